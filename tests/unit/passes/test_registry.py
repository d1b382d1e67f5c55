"""Naming passes, finding them, and the immutable pipeline."""

from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path

import pytest
from torch.fx import GraphModule

from dtorch.errors import PassError
from dtorch.passes import base
from dtorch.passes.base import CallablePass, Pass, PassContext, as_pass, find_pass, register_pass, registered_passes
from dtorch.passes.common_subexpressions import CommonSubexpressions
from dtorch.passes.pipeline import PassPipeline, default_passes


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    default_passes()  # registers DTorch's own
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))


def test_a_function_stays_a_function_and_gets_a_name() -> None:
    @register_pass(level="local", numerics="approximate", required=True)
    def halve_everything(graph_module: GraphModule, context: PassContext) -> int:
        return 7

    assert halve_everything(None, None) == 7
    found = find_pass("halve_everything")
    assert (found.level, found.numerics, found.required) == ("local", "approximate", True)
    assert found.run(None, None) == 7
    assert as_pass(halve_everything) == found
    assert "halve_everything" in registered_passes()


def test_a_class_keeps_its_options_as_fields() -> None:
    @register_pass(level="global", numerics="bitwise")
    @dataclass(frozen=True, kw_only=True)
    class BucketGathers(Pass):
        limit_bytes: int = 100

        def run(self, graph_module: GraphModule, context: PassContext) -> int:
            return self.limit_bytes

    found = find_pass("bucket_gathers", limit_bytes=5)
    assert found.run(None, None) == 5
    assert found == BucketGathers(limit_bytes=5) != BucketGathers()
    assert repr(found).endswith("BucketGathers(limit_bytes=5)")
    with pytest.raises(FrozenInstanceError):
        found.limit_bytes = 6
    with pytest.raises(PassError, match="limit_megabytes"):
        find_pass("bucket_gathers", limit_megabytes=5)


def test_a_name_taken_by_other_code_is_an_error_that_names_both_files() -> None:
    def first(graph_module: GraphModule, context: PassContext) -> int:
        return 0

    def second(graph_module: GraphModule, context: PassContext) -> int:
        return 0

    register_pass(level="global", numerics="bitwise", name="same")(first)
    with pytest.raises(PassError) as caught:
        register_pass(level="global", numerics="bitwise", name="same")(second)
    assert str(caught.value).count(Path(__file__).name) == 2
    register_pass(level="global", numerics="bitwise", name="same")(first)  # the same code again: a reload


def test_wrong_levels_and_numerics_are_errors_that_list_the_choices() -> None:
    with pytest.raises(PassError, match="global, local, scheduled"):
        register_pass(level="plan", numerics="bitwise")(lambda graph_module, context: 0)
    with pytest.raises(PassError, match="bitwise, reassociates, approximate"):
        register_pass(level="global", numerics="exact")(lambda graph_module, context: 0)
    with pytest.raises(PassError, match="bitwise, reassociates, approximate"):
        PassContext(numerics="loose")


def test_unknown_names_come_with_the_nearest() -> None:
    with pytest.raises(PassError, match="Did you mean 'common_subexpressions'"):
        find_pass("common_subexpression")
    with pytest.raises(PassError, match="Did you mean 'dead_code'"):
        default_passes().disable("deadcode")
    with pytest.raises(PassError, match="not int"):
        as_pass(3)


def test_pipelines_are_immutable_and_keep_the_order_given() -> None:
    pipeline = default_passes()
    names = pipeline.names()

    def mine(graph_module: GraphModule) -> None:
        return None

    after = pipeline.insert_after("common_subexpressions", mine)
    before = pipeline.insert_before("common_subexpressions", mine)
    index = names.index("common_subexpressions")
    assert after.names()[index + 1] == before.names()[index] == "mine"
    assert pipeline.names() == names
    assert default_passes() is pipeline


def test_a_plain_callable_runs_last_of_global() -> None:
    pipeline = default_passes().append(lambda graph_module: None).append(lambda graph_module: None)
    assert [entry.name for entry in pipeline.enabled("global")][-2:] == ["<lambda>", "<lambda>_2"]
    assert isinstance(pipeline["<lambda>"], CallablePass)


def test_pipelines_with_the_same_callable_are_equal_and_hashable() -> None:
    def mine(graph_module: GraphModule) -> None:
        return None

    assert default_passes().append(mine) == default_passes().append(mine)
    assert hash(default_passes().append(mine)) == hash(default_passes().append(mine))


def test_a_pipeline_without_a_key_says_so() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Listed(Pass):
        names: list[str]

    assert default_passes().key() is default_passes()
    assert default_passes().append(Listed(names=["x"])).key() is None


def test_disable_and_enable() -> None:
    pipeline = default_passes().disable("dead_code")
    assert "dead_code" not in [entry.name for entry in pipeline.enabled("global")]
    assert pipeline.enable("dead_code") == default_passes()
    assert "disabled" in repr(pipeline)

    @register_pass(level="global", numerics="bitwise", required=True)
    def needed(graph_module: GraphModule, context: PassContext) -> int:
        return 0

    with pytest.raises(PassError, match="cannot be disabled"):
        default_passes().append("needed").disable("needed")


def test_what_users_give_as_passes() -> None:
    assert PassPipeline.of(None) is default_passes()
    assert PassPipeline.of(default_passes().disable("dead_code")).disabled == {"dead_code"}
    assert PassPipeline.of([len]).names() == (*[p.name for p in default_passes() if p.level == "global"], "len",
                                               *[p.name for p in default_passes() if p.level != "global"])  # fmt: skip
    with pytest.raises(PassError, match="twice"):
        default_passes().append(CommonSubexpressions)
