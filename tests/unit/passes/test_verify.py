"""The verifier: each rule of each level is broken once in a valid graph, and caught with the node and its line."""

from collections.abc import Callable

import pytest
import torch
from graph_building import GraphBuilder, aten, collectives, nodes_of
from torch.fx import GraphModule, Node

from dtorch.errors import VerifyError
from dtorch.ir.layout import PENDING, WHOLE, Split
from dtorch.ir.ops import keep_first, local_size, redistribute, slice_scatter_in_place
from dtorch.ir.signature import InputSpec, OutputSpec, Signature
from dtorch.ir.verify import verify
from dtorch.torch_private import fake_tensor

AXES = {"dp": 2, "tp": 4}
RR, RS, RP = (WHOLE, WHOLE), (WHOLE, Split(0)), (WHOLE, PENDING)
Break = Callable[[GraphModule], None]


def global_graph() -> GraphModule:
    b = GraphBuilder(AXES)
    x, w = b.input("x", 8, 4, spec=RS), b.input("w", 4, 4, spec=RR)
    whole = b.place(x, RR)
    y = b.call(aten.mm.default, whole, w, meta={"spec": RR})
    halves = b.call(aten.split.Tensor, y, 4, meta={"spec": (RR, RR)})
    return b.done(b.item(halves, 0, spec=RR), b.call(aten.relu.default, y, meta={"spec": RR}))


def local_graph() -> GraphModule:
    b = GraphBuilder(AXES)
    x = b.input("x", 2, 4)
    gathered = b.collect("all_gather_into_tensor", x, 4, "tp")
    size = b.call(local_size, 9, ((1, 1, 1),))
    kept = b.call(keep_first, gathered, 1)
    summed = b.collect("all_reduce", kept, "sum", "dp")
    return b.done(summed, b.call(aten.narrow.default, gathered, 0, 0, size))


def scheduled_graph() -> GraphModule:
    b = GraphBuilder(AXES)
    comm, compute = {"stream": "comm:tp", "storage": "pool"}, {"stream": "compute", "storage": "pool"}
    x, cache = b.input("x", 2, 4, storage="argument"), b.input("cache", 8, 4, storage="argument")
    y = b.call(aten.relu.default, x, meta=compute)
    started = b.call(collectives["all_gather_into_tensor"], y, 4, "tp", meta=comm | {"after": (y.name,)})
    z = b.call(aten.neg.default, y, meta=compute)
    waited = b.call(
        collectives["wait_tensor"], started, meta={"stream": "compute", "storage": "view", "after": (started.name,)}
    )
    b.call(aten.add.Tensor, cache, 1, meta=compute)
    new = b.call(aten.copy_.default, cache, waited, meta={"stream": "compute", "storage": "inplace"})
    return b.done(b.call(aten.t.default, z, meta={"stream": "compute", "storage": "view"}), new)


SIGNATURE = Signature(
    (
        InputSpec("x", "user", "x", (8, 4), torch.float32),
        InputSpec("w", "weight", "w", (4, 4), torch.float32),
    ),
    (OutputSpec("first", aliases="x"), OutputSpec("second", mutates="w")),
)
GRAPHS = {"global": global_graph, "local": local_graph, "scheduled": scheduled_graph}


@pytest.mark.parametrize("level", GRAPHS)
def test_the_valid_graphs_pass(level: str) -> None:
    verify(GRAPHS[level](), level, SIGNATURE if level == "global" else None, AXES, deep=True)


def first(graph_module: GraphModule, target: object) -> Node:
    return nodes_of(graph_module, target)[0]


def named(graph_module: GraphModule, name: str) -> Node:
    return next(node for node in graph_module.graph.nodes if node.name == name)


def output(graph_module: GraphModule) -> Node:
    return graph_module.graph.output_node()


def inserted(graph_module: GraphModule, before: Node, target: object, *args: object, **meta: object) -> Node:
    with graph_module.graph.inserting_before(before):
        node = graph_module.graph.call_function(target, args)
    node.meta.update(meta)
    return node


def move_to_front(graph_module: GraphModule) -> None:
    named(graph_module, "x").prepend(first(graph_module, aten.mm.default))


def late_input(graph_module: GraphModule) -> None:
    output(graph_module).prepend(named(graph_module, "w"))


def call_a_method(graph_module: GraphModule) -> None:
    node = output(graph_module)
    with graph_module.graph.inserting_before(node):
        graph_module.graph.call_method("relu", (node.args[0][0],))


def set_meta(target: object, **meta: object) -> Break:
    return lambda graph_module: first(graph_module, target).meta.update(meta)


def drop_meta(target: object, key: str) -> Break:
    return lambda graph_module: first(graph_module, target).meta.pop(key)


def set_args(target: object, position: int, value: object) -> Break:
    return lambda graph_module: first(graph_module, target).update_arg(position, value)


def set_output(make: Callable[[tuple], object]) -> Break:
    return lambda graph_module: setattr(output(graph_module), "args", (make(output(graph_module).args[0]),))


def insert(target: object, *args: object, **meta: object) -> Break:
    def apply(graph_module: GraphModule) -> None:
        x = named(graph_module, "x")
        known = {"val": x.meta["val"], "spec": x.meta.get("spec")} | meta
        inserted(graph_module, output(graph_module), target, x, *args, **known)

    return apply


def same_name(graph_module: GraphModule) -> None:
    first(graph_module, aten.relu.default).name = "x"


def second_reader(graph_module: GraphModule) -> None:
    started = first(graph_module, collectives["all_reduce"])
    inserted(graph_module, output(graph_module), aten.neg.default, started, val=started.meta["val"])


def wait_of_a_value(graph_module: GraphModule) -> None:
    wait = nodes_of(graph_module, collectives["wait_tensor"])[1]
    wait.args = (named(graph_module, "x"),)


BROKEN: list[tuple[str, Break, str]] = [
    ("global", move_to_front, "reads %redistribute, which comes later"),
    ("global", late_input, "reads %w, which comes later"),
    ("global", call_a_method, "is a call_method"),
    ("global", same_name, "has the name of an earlier node"),
    ("global", drop_meta(aten.mm.default, "val"), r'no meta\["val"\]'),
    ("global", drop_meta(aten.mm.default, "spec"), "has no placement"),
    ("global", set_meta(aten.mm.default, spec=(WHOLE,)), "is for 1 mesh axes; the mesh has 2"),
    ("global", set_meta(aten.relu.default, spec=(Split(2), WHOLE)), r"is S\(2\), but has 2 dimensions"),
    ("global", set_meta(aten.relu.default, spec=(Split(0, 1, 3), WHOLE)), "is no multiple of 3"),
    ("global", set_meta(aten.split.Tensor, spec=RR), "has no placement"),
    ("global", set_args(redistribute, 1, RP), r"redistributes from \[R, P\], but its operand is \[R, S\(0\)\]"),
    ("global", set_args(redistribute, 2, RP), r'redistributes to \[R, P\], but its meta\["spec"\] is \[R, R\]'),
    ("global", set_meta(redistribute, val=fake_tensor((2, 4), (4, 1), torch.float32, "cpu")), "must not change"),
    ("global", insert(aten.relu_.default), "writes to its operand; global graphs are functional"),
    ("global", insert(collectives["all_reduce"], "sum", "tp"), "says redistribute instead"),
    ("global", insert(collectives["wait_tensor"]), "a global graph has none"),
    ("global", insert(keep_first, 1), "depends on the mesh coordinate"),
    ("global", insert(torch.relu), "relu is not an ATen overload"),
    ("global", set_output(list), "the output is one flat tuple"),
    ("global", set_output(lambda results: results[0]), "the output is one flat tuple"),
    ("global", set_output(lambda results: (results, results)), "the output tuple is flat"),
    ("global", set_output(lambda results: results[:1]), "returns 1 values; the signature has 2"),
    ("global", set_output(lambda results: (results[0], 3)), 'new value of input "w" is 3'),
    ("local", insert(redistribute, RR, RR), "stands in global graphs only"),
    ("local", insert(aten.relu_.default), "local graphs are functional"),
    ("local", second_reader, "read by exactly one wait_tensor; this one is read by %wait_tensor_default_1, %neg"),
    ("local", wait_of_a_value, "reads something that is not a collective|is read by nothing"),
    ("local", insert(collectives["all_reduce"], "sum", "tp"), "this one is read by nothing"),
    ("local", set_args(collectives["all_reduce"], 2, 0), "groups are named by mesh axis"),
    ("local", set_args(collectives["all_reduce"], 2, "pp"), 'its group is "pp"; the mesh axes are dp, tp'),
    ("local", set_args(collectives["all_gather_into_tensor"], 1, 2), 'group size is 2; mesh axis "tp" has 4'),
    ("local", set_args(keep_first, 1, 2), "names mesh axis 2"),
    ("local", set_args(local_size, 1, ((1, 1, 5),)), "names mesh axis 5"),
    ("scheduled", drop_meta(aten.relu.default, "stream"), r'no meta\["stream"\]'),
    ("scheduled", set_meta(aten.relu.default, stream="fast"), "streams are"),
    ("scheduled", set_meta(collectives["all_gather_into_tensor"], stream="comm:pp"), "mesh axes are dp, tp"),
    ("scheduled", drop_meta(aten.neg.default, "storage"), "has storage None"),
    ("scheduled", set_meta(aten.neg.default, storage="view"), "makes a value of its own"),
    ("scheduled", set_meta(aten.neg.default, storage="argument"), "and only they"),
    ("scheduled", set_meta(aten.neg.default, storage="inplace"), "does not write in place"),
    ("scheduled", set_meta(aten.copy_.default, storage="pool"), "writes in place"),
    ("scheduled", drop_meta(collectives["all_gather_into_tensor"], "after"), "without an event between"),
    ("scheduled", drop_meta(collectives["wait_tensor"], "after"), "without an event between"),
    ("scheduled", set_meta(aten.relu.default, after=("neg_default",)), "which is not an earlier node"),
]


@pytest.mark.parametrize(("level", "apply", "message"), BROKEN, ids=[f"{b[0]}-{i}" for i, b in enumerate(BROKEN)])
def test_a_broken_rule_is_caught(level: str, apply: Break, message: str) -> None:
    graph_module = GRAPHS[level]()
    apply(graph_module)
    signature = SIGNATURE if level == "global" else None
    with pytest.raises(VerifyError, match=message) as caught:
        verify(graph_module, level, signature, AXES)
    assert "  -> " in str(caught.value)


def test_the_message_shows_the_users_line_and_five_lines_of_the_graph() -> None:
    graph_module = global_graph()
    set_meta(aten.mm.default, spec=None)(graph_module)
    with pytest.raises(VerifyError) as caught:
        verify(graph_module, "global", SIGNATURE, AXES)
    lines = str(caught.value).splitlines()
    assert lines[1] == "  from /home/user/model.py:4 in forward: line 4"
    assert len(lines) == 7
    assert lines[4].startswith("  -> %mm_default = aten.mm.default(%redistribute, %w)  # f32[8, 4]")


def test_a_read_after_an_overwrite_is_caught() -> None:
    graph_module = scheduled_graph()
    meta = {"stream": "compute", "storage": "pool"}
    cache = named(graph_module, "cache")
    inserted(graph_module, output(graph_module), aten.neg.default, cache, val=cache.meta["val"], **meta)
    with pytest.raises(VerifyError, match="overwrites %cache, which %neg_default_1 reads later"):
        verify(graph_module, "scheduled", None, AXES)


def test_an_overwrite_while_another_stream_reads_is_caught() -> None:
    graph_module = scheduled_graph()
    cache, copy = named(graph_module, "cache"), first(graph_module, aten.copy_.default)
    meta = {"val": cache.meta["val"], "storage": "pool"}
    side = inserted(graph_module, copy, aten.neg.default, cache, stream="comm:dp", **meta)
    with pytest.raises(VerifyError, match=f"overwrites %cache while %{side.name} may still read it on comm:dp"):
        verify(graph_module, "scheduled", None, AXES)
    copy.meta["after"] = (side.name,)
    verify(graph_module, "scheduled", None, AXES)


def test_events_are_transitive_over_streams() -> None:
    b = GraphBuilder(AXES)
    x = b.input("x", 2, 2, storage="argument")
    one = b.call(aten.relu.default, x, meta={"stream": "compute", "storage": "pool"})
    two = b.call(aten.neg.default, one, meta={"stream": "comm:dp", "storage": "pool", "after": (one.name,)})
    three = b.call(aten.add.Tensor, one, two, meta={"stream": "comm:tp", "storage": "output", "after": (two.name,)})
    verify(b.done(three), "scheduled", None, AXES)


def test_deep_verification_catches_a_shape_that_is_out_of_date() -> None:
    graph_module = global_graph()
    set_meta(aten.relu.default, val=fake_tensor((8, 8), (8, 1), torch.float32, "cpu"))(graph_module)
    verify(graph_module, "global", None, AXES)
    with pytest.raises(VerifyError, match=r"is recorded as f32\[8, 8\], but its operands make it f32\[8, 4\]"):
        verify(graph_module, "global", None, AXES, deep=True)


def test_getitem_must_be_the_element_it_names() -> None:
    graph_module = global_graph()
    item = next(node for node in graph_module.graph.nodes if node.name.startswith("getitem"))
    item.args = (item.args[0], 2)
    with pytest.raises(VerifyError, match="takes element 2"):
        verify(graph_module, "global", None, AXES)


def test_inputs_must_be_those_of_the_signature() -> None:
    renamed = Signature((SIGNATURE.inputs[1], SIGNATURE.inputs[0]), SIGNATURE.outputs)
    with pytest.raises(VerifyError, match='is input 0, which the signature calls "w"'):
        verify(global_graph(), "global", renamed, AXES)
    unknown = Signature(SIGNATURE.inputs, (OutputSpec("first"), OutputSpec("second", mutates="v")))
    with pytest.raises(VerifyError, match='"second" mutates "v", which is not an input'):
        verify(global_graph(), "global", unknown, AXES)


def test_a_graph_without_output_is_caught() -> None:
    with pytest.raises(VerifyError, match="does not end in an output node"):
        verify(GraphModule({}, torch.fx.Graph()), "global")


def test_our_own_op_that_writes_in_place_follows_the_rules_of_writing() -> None:
    b = GraphBuilder(AXES)
    cache, new = b.input("cache", 8, 4, storage="argument"), b.input("new", 1, 4, storage="argument")
    meta = {"stream": "compute", "storage": "inplace"}
    written = b.call(slice_scatter_in_place, cache, new, 0, 2, 3, 1, meta=meta)
    verify(b.done(written), "scheduled", None, AXES, deep=True)
    with pytest.raises(VerifyError, match="slice_scatter_in_place writes to its operand; local graphs are functional"):
        verify(written.graph.owning_module, "local", None, AXES)
    graph_module = written.graph.owning_module
    with graph_module.graph.inserting_before(output(graph_module)):
        late = graph_module.graph.call_function(aten.neg.default, (cache,))
    late.meta.update(val=cache.meta["val"], stream="compute", storage="pool")
    with pytest.raises(VerifyError, match="overwrites %cache"):
        verify(graph_module, "scheduled", None, AXES)
