"""The audit of the host tier names what is wrong, and residency refuses moves that its table does not have."""
import numpy as np
import pytest

from kits.ledger_planner import Planner, key_of
from sglane.mem_cache.hiradix_cache import NONE, READY, Residency
from sglane.mem_cache.kv_ledger import LedgerError
from sglane.mem_cache.page_layout import PageLayout


def with_both_tiers():
    """A node with twins, one that is host-only, private pages that are being backed up, and a load under way."""
    planner = Planner(16, 32, cp_size=2)
    planner.compute(key_of(0, 12))
    planner.compute(key_of(1000, 1012))
    planner.push_out(13)
    planner.compute(key_of(2000, 2008))
    holding, answer, _ = planner.admit(key_of(0, 13))
    planner.ledger.plan_backup(holding, key_of(0, 13), 13)
    other, _, _ = planner.admit(key_of(3000, 3009))
    planner.ledger.plan_backup(other, key_of(3000, 3009), 9)
    planner.issue([answer.load])
    return planner


def twin(ledger):
    return int(np.flatnonzero(ledger._host.residency.state == READY)[0])


def forget_twin(ledger):
    residency, page = ledger._host.residency, twin(ledger)
    residency.state[page], residency.copy[page] = NONE, 0


def share_host_page(ledger):
    residency = ledger._host.residency
    first, second = np.flatnonzero((residency.state == READY) & (np.arange(residency.num_pages) % 2 == 0))[:2]
    residency.copy[first] = residency.copy[second]


def lose_owner(ledger):
    ledger._tree.owners()[twin(ledger)] = 0


def lose_host_leaf(ledger):
    ledger._tree.host_leaves().leaves.popitem()


def miscount(ledger):
    next(iter(ledger._tree._nodes.values())).hosted_children_changed(1)


def forget_load(ledger):
    ledger._host.residency.loading[:] = 0


def forget_load_lease(ledger):
    ledger._tree._loads.clear()


def forget_ticket(ledger):
    ledger._host.residency.ticket[:] = 0


def unlink_node(ledger):
    ledger._tree._nodes.popitem()


@pytest.mark.parametrize(("damage", "message"), [
    (forget_twin, "host pages|twin"), (share_host_page, "more than one class"), (lose_owner, "owned by|cached host pages"),
    (lose_host_leaf, "host leaves"), (miscount, "children with such"), (forget_load, "load tickets by page"),
    (forget_load_lease, "leases"), (forget_ticket, "no ticket"), (unlink_node, "nodes are"),
])
def test_the_audit_names_what_is_wrong(damage, message):
    planner = with_both_tiers()
    planner.ledger.audit()
    damage(planner.ledger)
    with pytest.raises(LedgerError, match=message):
        planner.ledger.audit()


def pages(*ids):
    return np.array(ids, np.int32)


@pytest.mark.parametrize("move", [
    lambda residency: residency.reserve(pages(4), pages(6), False),  # has a twin
    lambda residency: residency.reserve(pages(6), pages(7), False),  # another lane
    lambda residency: residency.open(pages(4), 3),
    lambda residency: residency.commit(pages(4), pages(4), 3),
    lambda residency: residency.demote(pages(6)),
    lambda residency: residency.drop_copies(pages(6)),
    lambda residency: residency.begin_load(pages(6), 3),
    lambda residency: residency.end_load(pages(4), 3),
    lambda residency: (residency.begin_load(pages(4), 3), residency.leave(pages(4))),
    lambda residency: (residency.begin_load(pages(4), 3), residency.demote(pages(4))),
    lambda residency: (residency.begin_load(pages(4), 3), residency.begin_load(pages(4), 4)),
])
def test_a_move_that_the_table_does_not_have_names_page_lane_and_state(move):
    residency = Residency(PageLayout(4, 2), 8, 8, record_reusable=False)
    hosts = residency.allocator.alloc(pages(0))
    residency.reserve(pages(4), hosts, False)
    residency.open(pages(4), 1)
    assert residency.commit(pages(4), hosts, 1).all()
    with pytest.raises(LedgerError, match=r"page [46] \(lane 0\) .*(none|ready).*ticket"):
        move(residency)
