"""What tests of several processes share: trainings by name, and how to start processes that know each other.

As a script it trains: `several_processes.py FOLDER NAME…` leaves what comes of each training in FOLDER.
"""

import contextlib
import dataclasses
import json
import socket
import sys
from pathlib import Path

import numpy as np
import torch
from answering import Composing
from rcr_trainer.data.covr import covr_split
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.cache import Answer, AnswerCache, Use
from rcr_trainer.llm.model import LanguageModel
from rcr_trainer.rewards.ours import make_reward
from rcr_trainer.settings import GRPOSettings, SFTSettings
from rcr_trainer.training import runner as training_runner
from rcr_trainer.training.processes import Processes, join
from safetensors.torch import load_file, save_file
from tiny_bert import knowing
from training import StopError, stop_at, train_grpo, train_sft
from warm import Program

from langchain_rcr.basics.items import Item
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec

SPEC = ProgramSpec()
# 37 queries: the last batch of an epoch is a smaller one, and some steps leave nothing for the second process.
SPLIT = covr_split("110", 0, 37, 0, dev=11)
LISTWISE = {"k": 3, "batch_size": 12, "on_policy": 0.5, "on_policy_from": 0.3}
SAMPLED = {**LISTWISE, "candidates": 20}
INFONCE = {"loss": "infonce", "k": 3, "bm25_top": 10}
REMAX = {"advantage": "remax", "beta": 0, "train_candidates": True}

TRAININGS = {
    "listwise": ({**LISTWISE}, {**LISTWISE, "gradient_accumulation": 2}),
    "listwise, accumulated": (
        {**LISTWISE, "batch_size": 6, "gradient_accumulation": 2},
        {**LISTWISE, "batch_size": 6, "gradient_accumulation": 4},
    ),
    "listwise, sampled": (SAMPLED, {**SAMPLED, "gradient_accumulation": 2}),
    "infonce": ({**INFONCE, "batch_size": 8}, {**INFONCE, "batch_size": 16}),
    "infonce, accumulated": (
        {**INFONCE, "batch_size": 4, "gradient_accumulation": 3, "bm25_worst": 0},
        {**INFONCE, "batch_size": 8, "gradient_accumulation": 3, "bm25_worst": 0},
    ),
    "infonce, one row": (
        {**INFONCE, "batch_size": 1, "max_steps": 20, "bm25_worst": 0},
        {**INFONCE, "batch_size": 2, "max_steps": 20, "bm25_worst": 0},
    ),
    "infonce, transformer": (
        {**INFONCE, "batch_size": 8, "lr": 1e-3, "max_steps": 3},
        {**INFONCE, "batch_size": 16, "lr": 1e-3, "max_steps": 3},
    ),
    "grpo": ({"batch_size": 4}, {"batch_size": 8}),
    "grpo, one row": ({"batch_size": 3, "updates": 2}, {"batch_size": 6, "updates": 2}),
    "grpo, remax": ({**REMAX, "batch_size": 6}, {**REMAX, "batch_size": 12}),
    "grpo, answers": ({"batch_size": 5}, {"batch_size": 10}),
}
"""Name → the settings of each of two processes, and those of one alone that come to the same."""
RESUMED = ("listwise", "infonce", "grpo")


def train(name, settings, processes, folder, model, log, state_folder=None):
    if name.startswith("grpo"):
        reward = make_reward("structure_coverage" if "answers" in name else "context_coverage", SPEC)
        programs = {e.source: e.target for e in [*SPLIT.train, *SPLIT.dev]}
        with LanguageModel(Composing(programs=programs)) as llm:
            config = GRPOSettings.model_validate({"epochs": 2, "group_size": 6, "lr": 1e-3, "k": 3, **settings})
            data = (SPLIT.train, SPLIT.train, SPLIT.dev, SPEC, config, reward, llm)
            return train_grpo(model, *data, state_folder=state_folder, log=log, processes=processes)
    config = SFTSettings.model_validate({"epochs": 3, "lr": 1e-2, "patience": None, "temperature": 0.5, **settings})
    data = (SPLIT.train, SPLIT.train, SPLIT.dev, SPEC, config)
    return train_sft(model, *data, state_folder=state_folder, log=log, processes=processes)


def build(name, rank, folder):
    """Another model in each process: all begin with the first one's weights."""
    if "transformer" in name:
        model = TriEncoder.build("transformer", [], base=str(folder / "bert"), lam=1.0)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        return model
    items = [Item(e.source, e.target) for e in SPLIT.train]
    return TriEncoder.build("lexical", items, dim=16, seed=rank, scale=20.0, lam=1.0)


def write_bert(folder):
    """The base of the transformers; to be there before the processes start."""
    knowing(SPLIT.train, folder / "bert")


def outcome(name, processes, folder, *, stop=False):
    """Train by name; returns the last weights (not the best), the result and the figures of every step.

    With `stop` the training ends at its second epoch or step, and is continued.
    """
    settings = TRAININGS[name][0 if processes.size > 1 else 1]
    rows, last = [], {}
    model = build(name, processes.rank, folder)

    def log(at, figures):
        rows.append(figures)
        last.update({name: tensor.clone() for name, tensor in model.state_dict().items()})

    state = folder / f"state of {name}"
    if stop:
        with contextlib.suppress(StopError):
            train(name, settings, processes, folder, build(name, processes.rank, folder), stop_at(2), state)
    result = train(name, settings, processes, folder, model, log, state if stop else None)
    return last, dataclasses.asdict(result), rows


def start(arguments, *, count=2, cwd=None, environ=None):
    """Start processes that know each other, as `torchrun` would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **(environ or {}),
    }  # fmt: skip
    return [
        Program(*arguments, environ={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=cwd)
        for rank in range(count)
    ]


def end(processes, timeout=300):
    """Wait for them; returns (exit code, stdout, stderr) of each."""
    ended = [process.end(timeout) for process in processes]
    return [(done.returncode, done.stdout, done.stderr) for done in ended]


def read(folder, name, rank):
    """What `outcome` gave in a process."""
    return load_file(folder / f"{name} {rank}.safetensors"), *json.loads((folder / f"{name} {rank}.json").read_text())


def check_exchanges(processes):
    """Every exchange by itself."""
    rank, rows = processes.rank, np.arange(10, dtype=np.int64).reshape(5, 2)
    assert processes.size == 2
    assert processes.sum(np.array([1.5, rank])).tolist() == [3.0, 1.0]
    assert np.array_equal(processes.gather(rows[processes.part(5)], 5), rows)
    assert np.isnan(processes.gather(np.array([np.nan])[processes.part(1)], 1)).all()
    assert processes.texts("ä" * rank) == ["", "ä"]
    fitted = torch.nn.BatchNorm1d(2)  # which has parameters, and buffers of two types
    torch.nn.init.constant_(fitted.weight, rank + 7)
    fitted.running_mean.fill_(rank + 8)
    fitted.num_batches_tracked.fill_(rank + 9)
    processes.broadcast(fitted)
    assert (fitted.weight[0], fitted.running_mean[1], fitted.num_batches_tracked) == (7, 8, 9)
    with contextlib.suppress(ConfigError):
        processes.broadcast(torch.nn.BatchNorm1d(2 + rank))
        raise AssertionError
    parameters = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    parameters[0].grad = torch.full((2,), 1.0 + rank)
    if rank:
        parameters[1].grad = torch.ones(2)
    processes.sum_gradients(parameters)
    assert [None if p.grad is None else p.grad.tolist() for p in parameters] == [[3.0, 3.0], [1.0, 1.0], None]


def check_gradients(processes):
    """Gradients of all processes' losses go back through what each has encoded, if it has encoded anything."""
    for count in (5, 1):
        table = torch.arange(2.0 * count).reshape(count, 2).requires_grad_()
        vectors = processes.share(lambda part, table=table: table[part], count)
        assert torch.equal(vectors, table)
        ((processes.rank + 1) * vectors * vectors).sum().backward()
        expected = torch.zeros(count, 2)
        expected[processes.part(count)] = (6 * table.detach())[processes.part(count)]
        assert torch.equal(torch.zeros(count, 2) if table.grad is None else table.grad, expected)


def check_fitted_policy(processes):
    """What was fitted in closed form, buffers too, is the first process's, whatever the others have fitted."""
    items = [Item(e.source, e.target) for e in SPLIT.train]
    model = TriEncoder.build("structure", items, spec=SPEC)
    model.family.fit(model.query, items, seed=processes.rank)
    model.query.mean += 0.01 * processes.rank
    before = processes.texts(model.fingerprint())
    train("grpo", {"max_steps": 1, "batch_size": 2}, processes, None, model, None)
    after = processes.texts(model.fingerprint())
    assert before[0] != before[1]
    assert after[0] == after[1]


def check_cache(processes, folder):
    """Two processes make the same file of answers at the same moment, and use it."""
    for number in range(12):
        processes.texts("ready")
        cache = AnswerCache(folder / f"answers {number}.sqlite")
        spent = cache.put("m", {b"k": Answer(f"mine {processes.rank}")}, "account", Use(1, 2, 3))[1]
        processes.texts("done")
        assert cache.get([b"k"])[b"k"].text.startswith("mine")
        assert spent.calls <= cache.spent("account").calls == 2
        cache.close()


def main(folder, *names):
    training_runner.SAVE_EVERY_S = 0
    torch.set_num_threads(1)
    with join() as processes:
        check_exchanges(processes)
        check_gradients(processes)
        check_fitted_policy(processes)
        check_cache(processes, folder)
        for name in [*names, *(f"{name} resumed" for name in RESUMED)]:
            plain = name.removesuffix(" resumed")
            weights, result, rows = outcome(plain, processes, folder, stop=name != plain)
            save_file(weights, folder / f"{name} {processes.rank}.safetensors")
            (folder / f"{name} {processes.rank}.json").write_text(json.dumps([result, rows]))
    with join() as processes:  # as a second run of the same script does
        assert processes.texts(str(processes.rank)) == ["0", "1"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

__all__ = ["RESUMED", "TRAININGS", "Processes", "end", "outcome", "read", "start", "write_bert"]
