"""Ranks as processes, each with its own share of a tiny checkpoint's experts."""
from multiprocessing.connection import Connection

import torch

from kits.process_ranks import serve_plans
from sglane.configs.model_config import load_model_config
from sglane.distributed.groups import Groups
from sglane.layers.moe.shard import ExpertShard
from sglane.model_executor.loader import load_model


def expert_worker(rank: int, groups: Groups, pipe: Connection, path: str, page_size: int, num_rows: int) -> None:
    """A real model's executor in float32: a plan in, a result out, None ends it."""
    config = load_model_config(path, None)
    model = load_model(config, torch.device("cpu"), torch.float32, show_progress=False, shard=ExpertShard(rank, groups.experts.size))
    serve_plans(config, model, rank, groups, pipe, page_size, num_rows)
