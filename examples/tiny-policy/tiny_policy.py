"""Make, train, export and evaluate the tiny policy of the quickstart.

    python examples/tiny-policy/tiny_policy.py all

The subcommands are `data` (tasks and demonstrations), `train`, `export` (Hugging Face and ONNX), `evaluate`
(report.json) and `all`. They need torch, transformers, onnx, onnx-ir, onnxruntime-genai, tokenizers, numpy
and jinja2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime looks at it when it is imported.

import torch  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from transformers import Qwen3ForCausalLM  # noqa: E402

from tinypolicy.chat import END_OF_TEXT, IM_END, token_id  # noqa: E402
from tinypolicy.data import Demonstrations, make_demonstrations  # noqa: E402
from tinypolicy.export import largest_difference, save_hugging_face, save_onnx  # noqa: E402
from tinypolicy.report import evaluate  # noqa: E402
from tinypolicy.tasks import Task, generate, json_lines  # noqa: E402
from tinypolicy.templates import TEMPLATES  # noqa: E402
from tinypolicy.train import TrainSettings, build, train  # noqa: E402

QUICKSTART: Final = HERE.parent / "quickstart" / "tasks.jsonl"
HUGGING_FACE: Final = HERE / "hf"
ONNX: Final = HERE.parent.parent / "engine" / "src" / "rollyard_engine" / "models" / "tiny-policy"
REPORT: Final = HERE / "report.json"

TRAIN_SEED: Final = 0
HELD_OUT_SEED: Final = 1
QUICKSTART_TASKS: Final = 64
DEMONSTRATIONS: Final = 16_000
IMPATIENCE: Final = 0.35
VOCABULARY: Final = 1280
SETTINGS: Final = TrainSettings(
    seed=0, copy_steps=300, epochs=1.0, batch=24, matrix_lr=0.02, other_lr=3e-3, warmup=50
)


def quickstart_tasks() -> list[Task]:
    return generate(TEMPLATES, HELD_OUT_SEED, QUICKSTART_TASKS, "held-out")


def make_data(work: Path) -> None:
    started = time.perf_counter()
    QUICKSTART.parent.mkdir(parents=True, exist_ok=True)
    QUICKSTART.write_text(json_lines(quickstart_tasks()))
    tokenizer, demonstrations = make_demonstrations(TRAIN_SEED, DEMONSTRATIONS, VOCABULARY, IMPATIENCE)
    tokenizer.save(str(work / "tokenizer.json"))
    demonstrations.save(work / "demonstrations.npz")
    print(
        f"{DEMONSTRATIONS} demonstrations, {len(demonstrations.ids)} tokens, vocabulary "
        f"{tokenizer.get_vocab_size()}, {time.perf_counter() - started:.0f} s"
    )


def train_policy(work: Path) -> None:
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    model = build(
        tokenizer.get_vocab_size(),
        token_id(tokenizer, END_OF_TEXT),
        token_id(tokenizer, IM_END),
        SETTINGS.seed,
    )
    result = train(model, Demonstrations.load(work / "demonstrations.npz"), SETTINGS)
    model.save_pretrained(work / "model")
    summary = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": tokenizer.get_vocab_size(),
        "demonstrations": DEMONSTRATIONS,
        "impatience": IMPATIENCE,
        "data_seed": TRAIN_SEED,
        "held_out_seed": HELD_OUT_SEED,
        "settings": asdict(SETTINGS),
        "threads": torch.get_num_threads(),
        **asdict(result),
    }
    (work / "train.json").write_text(json.dumps(summary, indent=2) + "\n")


def export_policy(work: Path) -> None:
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    save_hugging_face(Qwen3ForCausalLM.from_pretrained(work / "model"), tokenizer, HUGGING_FACE)
    save_onnx(HUGGING_FACE, ONNX)
    data = Demonstrations.load(work / "demonstrations.npz")
    sequences = [data.ids[data.offsets[i] : data.offsets[i + 1] - 1].tolist() for i in range(32)]
    difference = largest_difference(HUGGING_FACE, ONNX, sequences)
    (work / "export.json").write_text(json.dumps({"onnx_relative_difference": difference}) + "\n")
    print(f"exported; logits differ by at most {difference:.1e} (relative)")


def evaluate_policy(work: Path, samples: int, seed: int) -> None:
    tokenizer = Tokenizer.from_file(str(HUGGING_FACE / "tokenizer.json"))
    model = Qwen3ForCausalLM.from_pretrained(HUGGING_FACE)
    report: dict[str, object] = {"evaluation": evaluate(model, tokenizer, quickstart_tasks(), samples, seed)}
    for part in ("train", "export"):
        if (work / f"{part}.json").exists():
            report[part] = json.loads((work / f"{part}.json").read_text())
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["evaluation"], indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make, train, export and evaluate the tiny policy.")
    parser.add_argument("step", choices=("data", "train", "export", "evaluate", "all"))
    parser.add_argument("--work", type=Path, default=HERE / "build", help="folder for intermediate files")
    parser.add_argument("--samples", type=int, default=8, help="rollouts per task in `evaluate`")
    parser.add_argument("--seed", type=int, default=0, help="sampling seed of `evaluate`")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.step in ("data", "all"):
        make_data(options.work)
    if options.step in ("train", "all"):
        train_policy(options.work)
    if options.step in ("export", "all"):
        export_policy(options.work)
    if options.step in ("evaluate", "all"):
        evaluate_policy(options.work, options.samples, options.seed)


if __name__ == "__main__":
    main()
