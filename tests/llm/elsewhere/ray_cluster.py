"""A Ray cluster of two nodes on this machine, and actors of a tiny model that tests share."""

import atexit
import itertools
import os
import sys
from dataclasses import replace
from functools import cache, partial

from genlm_backend.remote.ray_evaluator import RayEvaluator
from tests.llm.elsewhere import over_there, shared


@cache
def started():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
    import ray
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 2, "object_store_memory": 200 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    cluster.add_node(**options)
    ray.init(address=cluster.address, log_to_driver=False)

    def end():
        ray.shutdown()
        cluster.shutdown()

    atexit.register(end)
    return cluster


@cache
def opened(number):
    started()
    make = partial(shared.make_fresh, over_there.saved("llama"), 1 << 20)
    evaluator = RayEvaluator(make, num_cpus=0.1)
    return evaluator, evaluator.open()


_requests = itertools.count(1)


def shared_evaluators(max_length=None, count=2):
    """Evaluators in actors that all models of the tests use, one at a time."""
    made = []
    for number in range(count):
        owner, info = opened(number)
        evaluator = RayEvaluator(over_there.Told)
        evaluator._actor, evaluator._number = owner._actor, 10**6 * next(_requests)
        evaluator._job = owner._job
        evaluator.info = replace(info, max_length=max_length or info.max_length)
        evaluator.ask("renew")
        evaluator.close = partial(leave, evaluator)
        made.append(evaluator)
    return made


def leave(evaluator):
    if evaluator._actor is not None:
        evaluator.ask("check")
        for adapter in list(evaluator.adapters):
            evaluator.remove_adapter(adapter)
    evaluator._actor = None
