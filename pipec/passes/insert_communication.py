"""Put a send and a recv on every edge between stages, or recompute what follows from inputs alone.

::

    h = gelu(x)             stage 0            h = gelu(x)             stage 0
    m = triu(mask)          stage 0            s = send(h, 2)          stage 0
    y = mul(h, m)           stage 2     ->     r = recv(s)             stage 2
                                               m_1 = triu(mask)        stage 2
                                               y = mul(r, m_1)         stage 2

A value is sent once, directly from the stage that makes it to each stage that reads it. So skip connections
need no relay. Where several stages on one rank read it, the plan lets the first hand it on to the others.

Every rank has the model's inputs. So values that need nothing else, such as masks and positions, are computed
again on the reading stage.
"""

from dataclasses import dataclass, field, replace

from torch import fx

from pipec.cost.formulas import node_bytes
from pipec.graph import (
    LoweringLevel,
    TrainingGraph,
    depends_on_inputs_only,
    depends_on_strides,
    is_constant,
    is_forward,
    is_tensor,
    is_view,
    recv,
    send,
    stage_of,
)


@dataclass(frozen=True)
class InsertCommunication:
    """Nodes of one stage read no node of another, besides the ``send`` that belongs to a ``recv``."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        crossings = _Crossings(graph)
        for user in list(graph.nodes):
            if is_constant(user):
                continue
            for source in user.all_input_nodes:
                if _is_computed(source) and stage_of(source) != stage_of(user):
                    user.replace_input_with(source, crossings.on_stage_of(source, user))
        graph.module.graph.eliminate_dead_code()
        return replace(graph, level=LoweringLevel.COMMUNICATION_INSERTED)


def _is_computed(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_constant(node)


@dataclass
class _Crossings:
    """The values that stages read from other stages. A stage makes or receives each at most once.

    ``originals`` maps a copy or a received value to its original node, which is what a third stage receives.
    """

    graph: TrainingGraph
    copies: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)
    originals: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def on_stage_of(self, source: fx.Node, user: fx.Node) -> fx.Node:
        source, stage = self.originals.get(source, source), stage_of(user)
        if is_constant(source) or stage_of(source) == stage:
            return source
        if (source, stage) not in self.copies:
            if depends_on_inputs_only(source):
                self.recompute(source, stage)
            elif self.should_send_base(source, user):
                self.view_on_stage_of(source, user)
            else:
                self.receive(source, user)
        return self.copies[source, stage]

    def should_send_base(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether the node is a view whose base is no larger: the base may be sent already."""
        if (
            not is_view(node)
            or depends_on_strides(node)
            or (is_forward(node) and stage_of(node) > stage_of(user))
        ):
            return False
        base = node.all_input_nodes[0]
        return (
            is_tensor(base)
            and len(node.all_input_nodes) == 1
            and base.op == "call_function"
            and node_bytes(base, self.graph.batch_size) <= node_bytes(node, self.graph.batch_size)
        )

    def view_on_stage_of(self, node: fx.Node, user: fx.Node) -> None:
        base = self.on_stage_of(node.all_input_nodes[0], user)
        with self.graph.module.graph.inserting_after(node):
            copy = self.graph.module.graph.node_copy(node, lambda _: base)
        copy.meta = {**node.meta, "stage": stage_of(user)}
        self.add(node, copy)

    def add(self, original: fx.Node, copy: fx.Node) -> None:
        self.copies[original, stage_of(copy)] = copy
        self.originals[copy] = original

    def recompute(self, node: fx.Node, stage: int) -> fx.Node:
        node = self.originals.get(node, node)
        if node.op == "placeholder" or is_constant(node) or stage_of(node) == stage:
            return node
        if (node, stage) not in self.copies:
            inputs = {source: self.recompute(source, stage) for source in node.all_input_nodes}
            with self.graph.module.graph.inserting_after(node):
                copy = self.graph.module.graph.node_copy(node, lambda source: inputs[source])
            copy.meta = {**node.meta, "stage": stage}
            self.add(node, copy)
        return self.copies[node, stage]

    def receive(self, source: fx.Node, user: fx.Node) -> None:
        """Add a send and a recv. What the backward of an earlier stage reads travels with the gradients."""
        forward = is_forward(source) and stage_of(source) < stage_of(user)
        phase = (source if forward else user).meta["phase"]
        meta = {key: source.meta[key] for key in ("val", "operator", "cost")} | {"phase": phase}
        fx_graph = self.graph.module.graph
        with fx_graph.inserting_after(source):
            sent = fx_graph.call_function(send, (source, stage_of(user)))
        with fx_graph.inserting_after(sent):
            received = fx_graph.call_function(recv, (sent,))
        sent.meta = {**meta, "stage": stage_of(source)}
        received.meta = {**meta, "stage": stage_of(user)}
        self.add(source, received)
