"""Replicas in actors of a Ray cluster of two nodes, which is made on this machine."""

import asyncio
import os
import pickle
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from genlm_backend.errors import (
    EngineDiedError,
    EvaluationError,
    MissingExtraError,
    ModelStateError,
    OptionError,
    OptionTypeError,
    TokenizerDecodeError,
)
from genlm_backend.llm import AsyncReplicas, RowQuery
from genlm_backend.multimodal.pictures import Pictures
from genlm_backend.remote import arguments
from genlm_backend.remote import ray_evaluator as on_ray
from genlm_backend.remote.arguments import ArgumentDecoder, ArgumentEncoder
from genlm_backend.remote.messages import Reply, UnknownPictures
from genlm_backend.remote.ray_evaluator import RayEvaluator
from tests.llm.elsewhere import over_there, ray_cluster
from tests.llm.elsewhere.over_there import Told, word_tokenizer
from tests.llm.elsewhere.test_process import close_to
from tests.naive import naive_row

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def cluster():
    return ray_cluster.started()


def make(count=2, **options):
    evaluators = [RayEvaluator(Told, num_cpus=0.1, **options) for _ in range(count)]
    return AsyncReplicas(word_tokenizer(), evaluators, row_cache_bytes=0)


async def until(condition, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


@needs_ray
async def test_rows_scores_and_errors_of_actors_reach_the_caller(cluster):
    with make() as lm:
        contexts = [[i, j] for i in range(1, 9) for j in range(10)]
        rows = await asyncio.gather(*map(lm.next_token_logprobs, contexts))
        for row, context in zip(rows, contexts, strict=True):
            close_to(row, context)
        assert (await lm.score([1], [2, 3, 4])).tolist() == [0, -1, -2]
        with pytest.raises(TokenizerDecodeError, match="by the test"):
            await lm.next_token_logprobs([94])
        with pytest.raises(torch.OutOfMemoryError):
            await lm.next_token_logprobs([85])
        with pytest.raises(EvaluationError, match="Unpicklable: 1 and 2"):
            await lm.next_token_logprobs([95])
        asked = [asyncio.ensure_future(lm.next_token_logprobs([90, i, 90])) for i in range(6)]
        await asyncio.sleep(0.5)
        for task in asked:
            task.cancel()
        start = time.monotonic()
        close_to(await lm.next_token_logprobs([2]), [2])
        assert time.monotonic() - start < 5


@pytest.mark.slow
@needs_ray
async def test_killed_actor_restarts_and_callers_get_exact_rows(cluster):
    import ray

    with make() as lm:
        for number in (0, 1, 0):
            ray.kill(lm._set.evaluators[number]._actor, no_restart=False)
            contexts = [[number, i] for i in range(20)]
            rows = await asyncio.gather(*map(lm.next_token_logprobs, contexts))
            for row, context in zip(rows, contexts, strict=True):
                close_to(row, context)
            await until(lambda: lm.num_alive == 2)
        with pytest.raises(EngineDiedError):
            await lm.next_token_logprobs([91])
        await until(lambda: lm.num_alive == 2)
        close_to(await lm.next_token_logprobs([1]), [1])


@pytest.mark.slow
@needs_ray
async def test_killed_node_loses_no_row_of_running_particles(cluster):
    node = cluster.add_node(num_cpus=1, resources={"third": 1})
    with AsyncReplicas(
        word_tokenizer(),
        [RayEvaluator(Told, num_cpus=0.1), on_node("third"), RayEvaluator(Told, num_cpus=0.1)],
        row_cache_bytes=0,
    ) as lm:
        done = []

        async def particle(index):
            context = [index]
            while len(context) < 40:
                close_to(await lm.next_token_logprobs(context), context)
                context.append((context[-1] * 7 + index) % 80)
                done.append(1)

        async def killer():
            await until(lambda: len(done) > 80)
            cluster.remove_node(node, allow_graceful=False)

        await asyncio.gather(killer(), *map(particle, range(12)))
        assert len(done) == 12 * 39
        assert lm.num_alive >= 2


def on_node(resource):
    """An evaluator that Ray has to place on a node that has a resource."""
    evaluator = RayEvaluator(Told, num_cpus=0.1)
    evaluator._options["resources"] = {resource: 0.1}
    return evaluator


@pytest.mark.slow
@needs_ray
def test_concurrent_drivers_on_one_cluster_get_the_same_answer(cluster):
    code = """
    import sys
    from genlm_backend.llm import AsyncReplicas
    from genlm_backend.remote.ray_evaluator import RayEvaluator, connect
    from tests.llm.elsewhere.over_there import Told, word_tokenizer
    connect()
    evaluators = [RayEvaluator(Told, num_cpus=0.1)]
    with AsyncReplicas(word_tokenizer(), evaluators, row_cache_bytes=0) as lm:
        print(lm.next_token_logprobs_sync([5, 6]).argmax().item(), flush=True)
    """
    environment = {
        **os.environ,
        "RAY_ADDRESS": cluster.address,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path]),
    }
    command = [sys.executable, "-c", textwrap.dedent(code)]
    drivers = [
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    with make() as lm:
        expected = lm.next_token_logprobs_sync([5, 6]).argmax().item()
        for driver in drivers:
            out, said = driver.communicate(timeout=120)
            numbers = [line for line in out.split("\n") if line.isdigit()]
            assert numbers == [str(expected)], said  # Ray may say something beside it
        close_to(lm.next_token_logprobs_sync([7]), [7])


@needs_ray
def test_transformers_model_on_ray_gives_its_plain_rows(cluster):
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = over_there.saved("llama")
    PreTrainedTokenizerFast(tokenizer_object=word_tokenizer()).save_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    options = {"kv_cache_bytes": 1 << 20, "self_check": False, "num_cpus": 0.5}
    with AsyncReplicas.on_ray(folder, 2, **options) as lm:
        contexts = [[i, 1, 2, j] for i in range(5) for j in range(4)]
        rows = lm.batch_next_token_logprobs_sync(contexts)
        wanted = torch.stack([naive_row(plain, context) for context in contexts])
        torch.testing.assert_close(rows, wanted, rtol=0, atol=2e-5)
        assert lm.num_alive == 2


@needs_ray
def test_version_mismatch_with_an_actor_raises_model_state_error(cluster, monkeypatch):
    monkeypatch.setattr(on_ray, "library_version", lambda: "0.0.1")
    with pytest.raises(ModelStateError, match=r"replica has genlm-backend .* caller has 0\.0\.1"):
        make(1)


def test_new_actor_replies_with_engine_died_error():
    there = on_ray.EvaluatorActor()
    reply = there.ask(1, "evaluate", pickle.dumps(([RowQuery([1])],)))
    assert isinstance(reply.error.error(), EngineDiedError)
    assert (reply.value, reply.counts) == (None, None)


def test_new_actor_sent_only_picture_keys_replies_engine_died_error():
    pictures = Pictures.of([1, 2], {"pixel_values": torch.ones(2, 2)}, 1, 1)
    sender = ArgumentEncoder()
    sender.packed((pictures,))
    again = sender.packed((pictures,))  # now by their key alone
    there = on_ray.EvaluatorActor()
    assert isinstance(there.ask(1, "evaluate", again).error.error(), EngineDiedError)
    assert ArgumentDecoder().arguments(again) is None


def test_dropped_pictures_are_sent_again(monkeypatch):
    monkeypatch.setattr(arguments, "MAX_PICTURE_BYTES", 1)
    first, second = (
        Pictures.of([1, 2], {"pixel_values": torch.full((2, 2), x)}, 1, 1) for x in (0.0, 1.0)
    )
    sender, receiver, replies = ArgumentEncoder(), ArgumentDecoder(), []

    def answered(packed):
        received = receiver.arguments(packed)
        replies.append(received and [own.key for own in received])
        return Reply(0, UnknownPictures() if received is None else received, None, None)

    for asked in ((first, second), (second,), (first, second, first)):
        reply = sender.ask("evaluate", asked, answered)
        assert [own.key for own in reply.value] == [own.key for own in asked]
    assert replies == [
        [first.key, second.key],
        [second.key],
        None,
        [first.key, second.key, first.key],
    ]


def test_invalid_options_and_missing_ray_are_refused(monkeypatch):
    with pytest.raises(OptionError, match="num_gpus"):
        RayEvaluator(Told, num_gpus=-1)
    with pytest.raises(OptionTypeError, match="max_restarts"):
        RayEvaluator(Told, max_restarts="ever")
    with pytest.raises(OptionError, match="num_replicas"):
        AsyncReplicas.on_ray("smollm2", 0)
    with pytest.raises(OptionTypeError, match="address must be a string"):
        on_ray.connect(6379)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"genlm-backend\[ray\]"):
        on_ray.connect()


@needs_ray
def test_address_without_a_cluster_raises_option_error_in_seconds():
    code = """
    from genlm_backend.remote.ray_evaluator import connect
    from genlm_backend.errors import OptionError
    import time
    start = time.monotonic()
    try:
        connect("127.0.0.1:9")
    except OptionError as error:
        assert "cannot join a Ray cluster at the address '127.0.0.1:9'" in str(error)
        assert time.monotonic() - start < 10
        print("told")
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert out.stdout.strip() == "told", out.stderr
