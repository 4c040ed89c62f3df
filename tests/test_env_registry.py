# SPDX-License-Identifier: Apache-2.0
"""Environments by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from palestra.env import CalculatorEnv, make_env
from palestra.errors import ConfigError
from palestra.registry import check_options


def test_a_factory_makes_a_new_environment_for_each_episode() -> None:
    factory = make_env("calculator", max_steps=2)
    one, other = factory(), factory()
    assert isinstance(one, CalculatorEnv)
    assert one.max_steps == 2
    assert one is not other


def test_a_mistyped_environment_fails_before_the_first_rollout() -> None:  # et-016
    with pytest.raises(ConfigError, match=r"'calculater'.*did you mean 'calculator'"):
        make_env("calculater")


def test_a_mistyped_option_fails_before_the_first_rollout() -> None:
    with pytest.raises(ConfigError, match=r"'max_step'.*did you mean 'max_steps'"):
        make_env("calculator", max_step=3)


def test_a_users_own_class_is_named_by_its_path() -> None:
    assert isinstance(make_env("palestra.env.calculator:CalculatorEnv")(), CalculatorEnv)
    with pytest.raises(ConfigError, match="did you mean 'CalculatorEnv'"):
        make_env("palestra.env.calculator:CalculatrEnv")


def test_environments_and_the_contract_of_chat_import_nothing_heavy() -> None:
    code = "import sys, palestra.env, palestra.chat; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"


def test_a_factory_that_does_not_show_its_parameters_is_one_line() -> None:
    with pytest.raises(ConfigError, match="env 'builtins:dict': its parameters cannot be read"):
        check_options("env 'builtins:dict'", dict, {})
