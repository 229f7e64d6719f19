"""Whether the arrays of a prefix tree, its slots and its states agree with each other."""

import numpy as np

from genlm_backend.prefix.node_loops import child_of


def check_integrity(tree, held=()):
    """Count slots, nodes and states; ``held`` are slots allocated whose nodes are not linked."""
    nodes = tree.nodes
    linked = np.sort(nodes.table[nodes.table > 0])
    check_nodes(nodes, linked)
    slots, states = nodes.slot[linked], nodes.state[linked]
    check_slots(tree.slots, [*slots[slots > 0].tolist(), *held])
    check_slots(tree.host_slots, (-slots[slots < 0]).tolist())
    assert tree._num_linked == (slots > 0).sum()
    check_states(states, linked, tree.states._owner, tree.states.num_used)
    check_states(-states, linked, tree.states.host.owner, tree.states.host.num_used)


def check_nodes(nodes, linked):
    size, parents = nodes.num_made, nodes.parent[linked]
    assert (np.bincount(parents, minlength=size) == nodes.num_children[:size]).all(), "children"
    on_device = parents[nodes.slot[linked] > 0]
    assert (np.bincount(on_device, minlength=size) == nodes.num_on_device[:size]).all()
    assert (nodes.depth[linked] == nodes.depth[parents] + 1).all(), "one token longer"
    assert (nodes.root[linked] == nodes.root[parents]).all()
    assert not ((nodes.slot[parents] < 0) & (nodes.slot[linked] > 0)).any(), "device after host"
    for node in linked.tolist():
        own = nodes.parent[node], nodes.token[node]
        assert child_of(nodes.parent, nodes.token, nodes.table, *own) == node
    first = nodes.first[:size]
    assert (nodes.parent[first[first > 0]] == np.flatnonzero(first)).all()
    assert len(linked) == len(set(linked.tolist()))
    assert not np.isin(linked, nodes._free[: nodes._num_free]).any(), "linked and free"


def check_slots(slots, owned):
    """Every slot that was handed out is free, in one stretch that is found, or has one owner."""
    extents = [range(start, stop) for start, stop in slots._stops.items()]
    assert sorted(slots._by_size) == sorted((len(each), each.start) for each in extents)
    free = [slot for stretch in extents for slot in stretch]
    assert sorted([*owned, *free]) == [*range(1, slots._next_unused)], "one owner"
    assert slots.num_used == len(owned), "used slots"


def check_states(states, linked, owner, num_used):
    own = states[states > 0]
    assert len(np.unique(own)) == len(own) == num_used, "one node each"
    assert (owner[own] == linked[states > 0]).all()
