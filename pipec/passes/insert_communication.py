"""Put a send and a recv on every edge between stages, or recompute the value where that is cheaper.

::

    h = gelu(x)             stage 0            h = gelu(x)             stage 0
    m = triu(mask)          stage 0            s = send(h, 2)          stage 0
    y = mul(h, m)           stage 2     ->     r = recv(s)             stage 2
                                               m_1 = triu(mask)        stage 2
                                               y = mul(r, m_1)         stage 2

A value is sent once, directly from the stage that makes it to each stage that reads it. So skip connections
need no relay. Where several stages on one rank read it, the plan lets the first hand it on to the others.

Every rank has the model's inputs. So values that need no parameter, such as masks and positions, are computed
again on the reading stage if that costs less than the message.
"""

from dataclasses import dataclass, field, replace

from torch import fx

from pipec.cost.formulas import OperatorCost
from pipec.cost.symbolic_sizes import evaluate_cost
from pipec.graph import (
    LoweringLevel,
    TrainingGraph,
    depends_on_inputs_only,
    depends_on_strides,
    has_data_dependent_size,
    is_constant,
    is_forward,
    is_tensor,
    is_view,
    recv,
    send,
    stage_of,
)
from pipec.hardware.devices import LinkModel


@dataclass(frozen=True)
class InsertCommunication:
    """``link`` gives the cost of a message, to compare with computing the value on the reading stage."""

    link: LinkModel

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        crossings = _Crossings(graph, self.link)
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
    link: LinkModel
    copies: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)
    originals: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def on_stage_of(self, source: fx.Node, user: fx.Node) -> fx.Node:
        source, stage = self.originals.get(source, source), stage_of(user)
        if is_constant(source) or stage_of(source) == stage:
            return source
        if (source, stage) not in self.copies:
            if depends_on_inputs_only(source) and self.should_recompute(source, stage):
                self.recompute(source, stage)
            elif self.should_send_base(source, user):
                self.view_on_stage_of(source, user)
            else:
                self.receive(source, user)
        return self.copies[source, stage]

    def should_recompute(self, node: fx.Node, stage: int) -> bool:
        """Whether computing the value on ``stage`` costs less than a message, or a message is impossible."""
        return has_data_dependent_size(node) or self.cost_to_recompute(node, stage) < self.cost_to_send(node)

    def should_send_base(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether the node is a view whose base costs no more to send: the base may be sent already."""
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
            and self.cost_to_send(base) <= self.cost_to_send(node)
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

    def cost_to_recompute(self, node: fx.Node, stage: int) -> float:
        """Seconds to compute the node on ``stage``, with every node it needs and the stage lacks."""
        pending, seen, seconds = [node], set(), 0.0
        while pending:
            current = pending.pop()
            current = self.originals.get(current, current)
            if current in seen or current.op == "placeholder" or is_constant(current):
                continue
            seen.add(current)
            if (current, stage) not in self.copies and stage_of(current) != stage:
                seconds += self.seconds(current)
                pending.extend(current.all_input_nodes)
        return seconds

    def cost_to_send(self, node: fx.Node) -> float:
        cost: OperatorCost = node.meta["cost"]
        size = evaluate_cost(cost.output_bytes, self.graph.batch_size)
        return self.link.latency_seconds + size / self.link.bytes_per_second

    def seconds(self, node: fx.Node) -> float:
        cost: OperatorCost = node.meta["cost"]
        return cost.seconds(self.graph.batch_size)

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
        phase = source.meta["phase"] if forward or not is_forward(source) else user.meta["phase"]
        meta = {key: source.meta[key] for key in ("val", "operator", "cost")} | {"phase": phase}
        fx_graph = self.graph.module.graph
        with fx_graph.inserting_after(source):
            sent = fx_graph.call_function(send, (source, stage_of(user)))
        with fx_graph.inserting_after(sent):
            received = fx_graph.call_function(recv, (sent,))
        sent.meta = {**meta, "stage": stage_of(source)}
        received.meta = {**meta, "stage": stage_of(user)}
        self.add(source, received)
