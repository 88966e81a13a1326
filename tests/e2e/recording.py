"""`megarl ...`, which also writes each step's samples into the run folder: [uid, weight version] in samples.jsonl."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megarl import cli
from megarl.driver import loop
from megarl.driver.loop import Session
from megarl.driver.rollout import RolloutBatch

_check = loop.check_samples


def record(session: Session, batch: RolloutBatch, version: int) -> None:
    with (Path(session.config.run.folder) / "samples.jsonl").open("a") as file:
        file.write(json.dumps([[info.uid, info.min_weight_version] for info in batch.infos]) + "\n")
    _check(session, batch, version)


if __name__ == "__main__":
    loop.check_samples = record
    sys.exit(cli.main())
