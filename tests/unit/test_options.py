"""Options: environment variables, override blocks, logs and the progress bar; and the errors' own promises."""

import io
import logging
import sys
import threading

import pytest

from dtorch import errors, options
from dtorch.errors import OptionError, nearest


def test_the_environment_is_read_into_options():
    read = options.from_environment(
        {
            "DTORCH_DUMP": "out",
            "DTORCH_LOGS": "passes, +comm",
            "DTORCH_VERIFY": "0",
            "DTORCH_PLAN_CACHE_ENTRIES": "3",
            "HOME": "",
        }
    )
    assert (read.dump, read.logs, read.verify, read.plan_cache_entries) == ("out", ("passes", "+comm"), False, 3)
    assert options.from_environment({}) == options.Options()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"DTORCH_LOGS": "pases"}, "DTORCH_LOGS.*did you mean 'passes'.*recompiles"),
        ({"DTORCH_VERIFY": "maybe"}, "use 1 or 0"),
        ({"DTORCH_PLAN_CACHE_ENTRIES": "many"}, "DTORCH_PLAN_CACHE_ENTRIES"),
        ({"DTORCH_PLAN_CACHE_ENTRIES": "0"}, "at least 1"),
        ({"DTORCH_PROGRESS": "loud"}, '"auto", "on" or "off"'),
    ],
)
def test_a_value_that_does_not_fit_names_its_variable(environment, message):
    with pytest.raises(OptionError, match=message):
        options.from_environment(environment)


def test_a_misspelt_variable_is_warned_about_with_the_nearest():
    with pytest.warns(UserWarning, match="DTORCH_LOG .*did you mean 'DTORCH_LOGS'"):
        options.from_environment({"DTORCH_LOG": "passes"})


def test_override_holds_within_its_block_and_nests():
    assert options.current().verify is True
    with options.override(verify=False):
        with options.override(plan_cache_entries=2):
            assert (options.current().verify, options.current().plan_cache_entries) == (False, 2)
        assert options.current().plan_cache_entries == 256
        seen = []
        thread = threading.Thread(target=lambda: seen.append(options.current().verify))
        thread.start()
        thread.join()
        assert seen == [True], "a new thread has the process's options"
    assert options.current().verify is True


def test_override_refuses_an_unknown_option():
    with pytest.raises(OptionError, match="no option 'verfy': did you mean 'verify'"), options.override(verfy=True):
        pass


def test_logs_follow_the_request_and_go_to_stderr(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log = options.logger("passes")
    log.info("unseen")
    with options.override(logs=("passes", "+comm")):
        log.info("seen")
        log.debug("finer")
        options.logger("comm").debug("fine")
        options.logger("graph").info("not asked for")
    log.info("over")
    assert capsys.readouterr().err == "[dtorch.passes] seen\n[dtorch.comm] fine\n"
    with options.override(logs=("all",)):
        assert options.logger("recompiles").isEnabledFor(logging.INFO)
    with pytest.raises(OptionError, match="did you mean 'comm'"):
        options.logger("com")


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_shows_one_bar_and_none_when_nobody_watches(monkeypatch, capsys):
    assert list(options.progress([1, 2], desc="quiet")) == [1, 2]
    assert capsys.readouterr().err == ""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with options.override(progress="off"):
        assert list(options.progress([1, 2], desc="off")) == [1, 2]
    assert terminal.getvalue() == ""
    for _ in options.progress([1, 2], desc="outer"):
        assert list(options.progress([3], desc="inner")) == [3]
    assert "outer" in terminal.getvalue() and "inner" not in terminal.getvalue()


def test_describe_lists_every_option():
    assert len(options.describe().splitlines()) == len(options.Options.__dataclass_fields__)


def test_every_error_says_when_it_is_raised_and_can_be_caught_as_torch_users_expect():
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    assert len(classes) >= 15
    assert all(len((each.__doc__ or "").strip().splitlines()) >= 3 for each in classes)
    assert issubclass(errors.WeightsError, RuntimeError) and issubclass(errors.PlacementError, ValueError)
    assert str(errors.WeightsError("two\nlines")) == "two\nlines"


def test_nearest_finds_misspellings_and_nothing_else():
    assert nearest("weigth", ["bias", "weight"]) == ["weight"]
    assert nearest("TP", ["tp", "dp"])[0] == "tp"
    assert nearest("zzz", ["weight"]) == []
