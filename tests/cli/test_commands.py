"""Commands with recipes, end to end: exit codes and the last line of the output."""

import os
import re
import shlex
import socket
from pathlib import Path

import pytest
import torch

from lightning_ptdp.cli import main
from lightning_ptdp.cli.entry import VERBS
from lightning_ptdp.models import LitGPT
from tests.models.hf_models import hf_gpt2

pytestmark = pytest.mark.thorough

# Options that shrink the run of a recipe to a second: a tiny model on a tiny text.
TINY = (
    "--data.source text --data.data_dir tokens --data.vocabulary_size 320 --data.sequence_length "
    "32 --data.micro_batch_size 2 "
    "--data.validation_samples 8 --model.config.vocabulary_size 320 "
    "--model.config.sequence_length 32 --model.config.hidden_size 32 "
    "--model.optimizer.warmup_steps 0 --trainer.max_steps 2 --trainer.val_check_interval 2 "
    "--trainer.enable_progress_bar false"
)
ALONE = (
    "--trainer.devices 1 --trainer.strategy.tensor_parallel_size 1 "
    "--trainer.strategy.pipeline_parallel_size 1 "
    "--trainer.strategy.virtual_pipeline_size 1"
)
S = "--trainer.strategy."
NANO, ONE = f"--config gpt/nano {TINY}", f"--config gpt/nano {TINY} {ALONE}"
RUN = "runs/gpt-nano/RUN/checkpoints/last.ckpt"

WALK = [
    ("ptdp", r"its origin\.$"),
    ("ptdp --help", r"its origin\.$"),
    ("ptdp --version", r"^lightning-ptdp \d"),
    *((f"ptdp {verb} --help", r"\w") for verb in VERBS),
    ("ptdp fit -h", "global_batch_size"),
    ("ptdp fit --launcher slurm --help", "distributed\\)"),
    ("ptdp ckpt verify --help", "Exit codes"),
    ("ptdp recipes list", r"^[a-z]+/\S+ +[\d.]+ [KMBT] "),
    ("ptdp recipes show gpt/nano", "validation_samples"),
    ("ptdp recipes show common", ":"),
    ("ptdp recipes show bert/nano --resolved", "# bert/common"),
    ("ptdp recipes show gpt/nano --resolved --trainer.max_steps 3", "# gpt/common"),
    ("ptdp plan --recipe gpt/nano --world 8 --device cpu", r"num_microbatches: \d+"),
    ("ptdp plan --recipe bert/nano --world 4 --device cpu --top 1", r"num_microbatches: \d+"),
    (
        "ptdp plan --recipe gpt/ptdp-7.5b --world 512 --device a100 --tp 8 --top 2",
        r"num_microbatches: \d+",
    ),
    ("ptdp plan --recipe gpt/nano --world 2 --device cpu --json", "}"),
    ("ptdp plan --recipe gpt/nano --world 2 --device cpu --explain", r"\w"),
    ("ptdp timeline --pp 4 --vpp 2 --microbatches 8", r"\w"),
    ("ptdp completion bash", "complete -o default"),
    ("ptdp completion zsh", "compdef"),
    ("ptdp completion fish", "complete -c ptdp"),
    ("ptdp completion words -- recipes show gpt/124", "^gpt/124m$"),
    ("ptdp fit --launcher slurm --config gpt/124m --dry-run", "--resume=auto"),
    ("ptdp fit --launcher torchrun --config gpt/ptdp-1.7b --dry-run", "--resume=auto"),
    ("ptdp fit --launcher torchrun --config gpt/124m --output job.sh", "^written: job.sh"),
    ("ptdp doctor --devices 1 --json", "}"),
    (f"ptdp prepare {NANO}", "prepared in"),
    ("ptdp prepare --config hf/vision", "validation: "),  # it has a key of fit
    (f"ptdp prepare {NANO}", "found"),
    (f"ptdp fit {NANO} --print_config", "prompt: "),
    (f"ptdp fit {NANO} --sample.max_new_tokens 4", "."),
    (
        f"ptdp fit {ONE} --sample null --resume auto --trainer.max_steps 3",
        "mlflow ui --backend-store-uri",
    ),
    (f"ptdp fit {ONE} --init_from {RUN} --trainer.logger false --sample null", "^best: "),
    (f"ptdp validate {ONE} --ckpt_path {RUN}", "┘$"),
    (f"ptdp validate {ONE} --ckpt_path last", "┘$"),
    (f"ptdp test {ONE} --ckpt_path {RUN}", "┘$"),
    (f"ptdp predict {ONE} --ckpt_path {RUN} --output scores.jsonl", r"\w"),
    (f"ptdp generate --checkpoint {RUN} --max_new_tokens 4", r"\w"),
    (f"ptdp ckpt inspect {RUN}", "format"),
    (f"ptdp ckpt inspect {RUN} --tensors", "float32"),
    (f"ptdp ckpt inspect {RUN} --json", "}"),
    (f"ptdp ckpt verify {RUN}", "undamaged"),
    (f"ptdp ckpt reshard {RUN} weights --weights_only --dtype bfloat16", "^written: weights"),
    (f"ptdp convert {RUN} hf --verify", "^verified: the logits of GPT2LMHeadModel are equal"),
    (
        f"ptdp convert {RUN} served --register nano",
        r"^registered: mlflow\.transformers\.load_model\('models:/nano/1'\)",
    ),
    (
        f"ptdp convert {RUN} model.safetensors --prefix model.",
        r"^written: model.safetensors \(state_dict\)",
    ),
    (f"ptdp convert {RUN} single.ckpt", r"^written: single.ckpt \(lightning\)"),
    ("ptdp convert hf start", r"^written: start \(checkpoint\)"),
    (
        f"ptdp fit {ONE} --init_from hf --trainer.logger false --sample null --trainer.max_steps 1",
        "^best: ",
    ),
    (f"ptdp bench {ONE} --steps 1 --warmup 1", "^planner's estimate, fullest rank"),
    (
        f"ptdp bench --config hf/dpo {ALONE} --steps 1 --warmup 1",
        "^planner's estimate, fullest rank",
    ),
]

# Invalid commands and a pattern for the last line of their output.
# ``-1`` of a type "int or float" may be read as either: typing caches unions without their order.
BAD = [
    ("ptdp docter", r"did you mean 'doctor'\? \(ptdp --help lists all verbs\)"),
    ("ptdp fit", "there is no model. Use --config"),
    ("ptdp fit --config gpt/nanoo", "did you mean 'gpt/nano'"),
    ("ptdp fit --config empty.yaml", "empty.yaml is empty"),
    ("ptdp fit --config broken.yaml", "broken.yaml: is not YAML"),
    ("ptdp fit --config list.yaml", "has a list"),
    ("ptdp fit --config circle.yaml", "leads back to a file"),
    ("ptdp recipes show gpt/nanoo", "did you mean"),
    ("ptdp recipes show gpt/nano --trainer.max_steps 3", "need --resolved"),
    ("ptdp plan --world 8", "there is no model"),
    ("ptdp plan --recipe gpt/ptdp-18.4b --world 1", "no layout fits"),
    ("ptdp plan --recipe gpt/nano --world 8 --device h1000", "device='h1000' is unknown"),
    ("ptdp generate --checkpoint nowhere", "--checkpoint nowhere does not exist"),
    ("ptdp generate --checkpoint text.ckpt", "--checkpoint text.ckpt is not a checkpoint"),
    (f"ptdp verify {NANO} --output errors.foo", "--output errors.foo must end in .png, .pdf, .svg"),
    (
        f"ptdp verify {NANO} --output nowhere/errors.png",
        "nowhere does not exist. Create it, or use another folder",
    ),
    (
        "ptdp evaluate --checkpoint nowhere --tasks arc_easy",
        "--checkpoint nowhere does not exist",
    ),
    ("ptdp evaluate --checkpoint theirs --tasks arc_easy --limit 0", "limit=0 must be greater"),
    ("ptdp ckpt inspect nowhere", "nowhere"),
    ("ptdp ckpt verify text.ckpt", "text.ckpt"),
    ("ptdp convert nowhere hf", "nowhere does not exist"),
    ("ptdp convert text.ckpt fresh", "text.ckpt"),
    (
        "ptdp convert weights.ckpt theirs",
        "theirs is a folder with other content, which would be lost",
    ),
    (
        "ptdp convert theirs served --register nano",
        "--register nano: theirs is not beside an MLflow store",
    ),
    ("ptdp convert theirs model.safetensors --shard_size many", "--shard_size many is not a size"),
    ("ptdp doctor --devices 0", "--devices 0 must be at least 1"),
    (
        "ptdp fit --launcher slurm --config gpt/ptdp-3.6b --nodes 1 --gpus-per-node 3 --dry-run",
        "world_size=3",
    ),
    ("ptdp fit --launcher slurm --dry-run", "there is no model to train"),
    ("ptdp bench --config gpt/nano --steps 0", "--steps 0 must be at least 1"),
    (
        "ptdp bench --config gpt/nano --compare 't2 p1, d2'",
        "d2 would need 2 processes, but there are 4. Use d4",
    ),
    ("ptdp bench --config gpt/nano --compare t8", "--compare 't8': world_size=4"),
    (f"ptdp fit {ONE} --trainer.max_stps 3", "did you mean 'trainer.max_steps'"),
    (
        f"ptdp fit {ONE} --trainer.max_steps many",
        "trainer.max_steps: Expected int. Got value: many",
    ),
    (f"ptdp fit {ONE} --trainer.precision fp8", "trainer.precision: Expected .* Got value: fp8"),
    (f"ptdp fit {ONE} --resume always", "resume: Expected 'auto' or null. Got value: always"),
    (
        f"ptdp fit {ONE} --model.config.num_layer 4",
        "no key 'model.config.num_layer' .*did you mean 'config.num_layers'",
    ),
    (
        f"ptdp fit {ONE} --model LitGTP",
        "model=LitGTP is not an existing class; did you mean 'LitGPT'",
    ),
    (f"ptdp fit {ONE} --model my_module.Nothing", "module 'my_module' has no attribute 'Nothing'"),
    (
        f"ptdp fit {ONE} --model my_module.NoModule",
        "does not correspond to a subclass of LightningModule",
    ),
    (
        f"ptdp fit {ONE} --trainer.accelerator gpu",
        "trainer.accelerator=gpu, but torch finds no GPU .*--trainer.accelerator cpu",
    ),
    (f"ptdp fit {ONE} --trainer.accelerator tpu", "trainer.accelerator=tpu must be one of"),
    ("ptdp fit --config gpt/124m", "torch finds no GPU"),
    (f"ptdp fit {ONE} --ckpt_path text.ckpt", "--ckpt_path text.ckpt is not a checkpoint"),
    (
        f"ptdp fit {ONE} --ckpt_path weights.ckpt",
        "weights.ckpt has weights but no training state",
    ),
    (f"ptdp fit {ONE} --ckpt_path theirs", "theirs is a Hugging Face folder"),
    (f"ptdp fit {ONE} --init_from nowhere", "--init_from nowhere does not exist"),
    (f"ptdp fit {ONE} --init_from theirs", "theirs has no|has the shape .* in the checkpoint, but"),
    (
        f"ptdp fit {ONE} --model.config.num_kv_heads many",
        "model.config.num_kv_heads: Expected int or null. Got value: many",
    ),
    (f"ptdp fit {ONE} --model.config.num_layrs 3", "did you mean 'config.num_layers'"),
    (f"ptdp fit {NANO} --trainer.devices 3", "world_size=3 is not divisible"),
    (f"ptdp fit {NANO} --trainer.strategy.schedule zigzag", "schedule='zigzag'"),
    (f"ptdp fit {ONE} --trainer.devices=-1", "trainer.devices=-1 is not a number of processes"),
    (f"ptdp fit {ONE} --trainer.devices=0", "trainer.devices=0 is not a number of processes"),
    ("ptdp timeline --pp 2 --microbatches 4 --output text.ckpt/x.png", "--output .* is a file"),
    (f"ptdp fit {ONE} --launcher torchrun --output text.ckpt/x.sh", "--output .* is a file"),
    ("ptdp convert weights.ckpt text.ckpt/hf", "destination text.ckpt/hf: .* is a file"),
    (
        f"ptdp fit {ONE} --trainer.logger MLFlowLogger --trainer.logger.tracking_uri file:./mlruns",
        "tracking_uri='file:./mlruns': this version of MLflow no longer supports folders",
    ),
    (
        f"ptdp fit {NANO} --trainer.devices=[0,1]",
        r"trainer.devices=\[0, 1\] is not a number of processes",
    ),
    (
        "ptdp fit --config gpt/nano --config mapping.yaml",
        r"trainer=\['max_steps', 3\] must be a mapping",
    ),
    (f"ptdp fit {ONE} --config twice.yaml", "'max_steps' is given twice, in line 2 and in line 3"),
    (f"ptdp fit {ONE} --config utf16.json", "utf16.json: is not UTF-8"),
    (f"ptdp fit {ONE} --config theirs", "--config theirs is a folder"),
    (f"ptdp fit {ONE} --seed_everything=-1", "seed_everything=-1 must be between 0 and 4294967295"),
    (
        f"ptdp fit {NANO} --trainer.gradient_clip_val=-1",
        r"gradient_clip_val=-1(\.0)? must be 0 or more",
    ),
    (
        f"ptdp fit {NANO} --trainer.accumulate_grad_batches=0",
        "accumulate_grad_batches=0 must be 1 or more",
    ),
    (
        f"ptdp fit {ONE} --init_from theirs --ckpt_path weights.ckpt",
        "--init_from and --ckpt_path are both set",
    ),
    (f"ptdp fit {ONE} --export text.ckpt/x", "text.ckpt is a file"),
    (f"MASTER_PORT=abc ptdp fit {NANO}", "MASTER_PORT=abc is not a port"),
    (f"MASTER_PORT=TAKEN ptdp fit {NANO}", r"cannot listen at MASTER_PORT=\d+"),
    (
        f"ptdp fit {NANO} {S}tensor_parallel_size 0",
        "tensor_parallel_size=0 must be a positive integer",
    ),
    (
        f"ptdp fit {NANO} {S}tensor_parallel_size two",
        "tensor_parallel_size: Expected int. Got value: two",
    ),
    (f"ptdp fit {NANO} {S}tensor_paralel_size 2", "did you mean 'tensor_parallel_size'"),
    (
        f"ptdp fit {NANO} {S}pipeline_parallel_size=-2",
        "pipeline_parallel_size=-2 must be a positive integer",
    ),
    (f"ptdp fit {NANO} {S}virtual_pipeline_size 7", "num_layers=4 cannot fill .* = 14 stages"),
    (f"ptdp fit {NANO} {S}context_parallel_size 3", "world_size=4 is not divisible by .* = 12"),
    (
        f"ptdp fit {NANO} {S}expert_parallel_size 2",
        "expert_parallel_size=2 does not divide 1, the ranks of",
    ),
    (f"ptdp fit {NANO} {S}num_microbatches 0", "num_microbatches=0 must be a positive integer"),
    (f"ptdp fit {NANO} {S}micro_batch_size 2 {S}num_microbatches 2", "Set only one of them"),
    (f"ptdp fit {NANO} {S}schedule nowhere.csv", "nowhere.csv cannot be read as a schedule"),
    (f"ptdp fit {NANO} {S}recompute some", "recompute: Expected 'none'"),
    (
        f"ptdp fit {NANO} {S}recompute full {S}recompute_layers 99",
        "recompute_layers=99, but the stages have",
    ),
    (f"ptdp fit {NANO} {S}timeout_s 0", "timeout_s=0.0 must be greater than 0"),
    (f"ptdp fit {NANO} {S}fp8 e5m2", "fp8: Expected 'tensorwise'"),
    (f"ptdp fit {NANO} {S}partition [1,2]", r"partition=\[1, 2\] has 2 entries"),
    (f"ptdp fit {NANO} {S}start_method thread", "start_method: Expected 'popen'"),
    (f"ptdp fit {NANO} {S}check_finite maybe", "check_finite: Expected 'raise'"),
    (f"ptdp fit {ONE} {S}sequence_parallel true", "sequence_parallel=True splits activations"),
    (f"ptdp fit {NANO} {S}compile everything", "compile: Expected 'none'"),
    (f"ptdp fit {NANO} {S}verify last_step", "verify: Expected 'first_step'"),
    (
        f"ptdp fit {NANO} {S}microbatch_group_size 0",
        "microbatch_group_size=0 must be a positive integer",
    ),
    (f"ptdp fit {ONE} {S}layout auto", "layout='auto' chooses num_microbatches"),
    (f"ptdp fit {NANO} --trainer.devices 1000000", "allows at most"),
    (f"ptdp fit {NANO} --trainer.num_nodes 0", "num_nodes. must be a positive integer"),
    (f"ptdp fit {NANO} --trainer.num_nodes 2", "num_nodes=2, but MASTER_ADDR is not set"),
    (f"ptdp fit {NANO} --trainer.max_steps=-5", "max_steps. must be a non-negative integer"),
    (f"ptdp fit {NANO} --trainer.max_epochs=-5", "max_epochs. must be a non-negative integer"),
    (
        f"ptdp fit {NANO} --trainer.limit_train_batches=-1",
        r"invalid value -1(\.0)? for limit_train_batches",
    ),
    (
        f"ptdp fit {NANO} --trainer.val_check_interval 0",
        "val_check_interval=0 must be greater than 0",
    ),
    (f"ptdp fit {NANO} --trainer.log_every_n_steps=-1", "log_every_n_steps=-1 must be 0"),
    (
        f"ptdp fit {NANO} --trainer.accelerator quantum",
        "trainer.accelerator=quantum must be one of",
    ),
    (f"ptdp fit {NANO} --trainer.profiler nonsense", "profiler"),
    (f"ptdp fit {NANO} --trainer.logger Nothing", "logger=Nothing is not an existing class"),
    (
        f"ptdp fit {NANO} --trainer.callbacks+ my_module.NoModule",
        "not correspond to a subclass of Callback",
    ),
    (
        f"ptdp fit {NANO} --trainer.default_root_dir text.ckpt",
        "text.ckpt is a file, so no folder can be created",
    ),
    (f"ptdp fit {NANO} --trainer.max_time never", "not a valid duration"),
    (f"ptdp validate {NANO} --export=x", "--export is an option of ptdp fit, not of ptdp validate"),
    (
        f"ptdp fit {NANO} --trainer.callbacks+ WriteSamples "
        "--trainer.callbacks.init_args.prompts nowhere",
        "prompts='nowhere' cannot be read",
    ),
    (f"ptdp fit {NANO} --trainer.gradient_clip_algorithm sideways", "sideways is invalid"),
    (f"ptdp fit {NANO} --trainer.strategy nonsense", "strategy='nonsense'"),
    (
        f"ptdp fit {NANO} --data.source nowhere",
        r"source was \['text'\] and is now \['nowhere'\]",
    ),
    (f"ptdp fit {NANO} --data.sequence_length 0", "sequence_length=0 must be a positive integer"),
    (
        f"ptdp fit {NANO} --data.sequence_length 64",
        "sequence_length=32 is smaller than data.sequence_length=64",
    ),
    (f"ptdp fit {NANO} --data.micro_batch_size 0", "micro_batch_size=0 must be a positive integer"),
    (f"ptdp fit {NANO} --data.vocabulary_size 3", "vocabulary_size=3 must be an integer from"),
    (
        f"ptdp fit {NANO} --data.validation_samples=-1",
        "validation_samples=-1 must be a positive integer",
    ),
    (f"ptdp fit {NANO} --data.data_dir text.ckpt", "output=text.ckpt is a file. Give a folder"),
    (f"ptdp fit {NANO} --data.num_workers=-1", "num_workers=-1 must be an integer of at least 0"),
    (f"ptdp fit {NANO} --data Nothing", "data=Nothing is not an existing class"),
    (f"ptdp fit {NANO} --data.tokenizer text.ckpt", "did you mean 'tokenizer_dir'"),
    (
        f"ptdp fit {NANO} --model.config.hidden_size 33",
        "hidden_size=33 is not divisible by num_heads=4",
    ),
    (f"ptdp fit {NANO} --model.config.num_layers 3", "num_layers=3 cannot fill"),
    (
        f"ptdp fit {NANO} --model.config.vocabulary_size 10",
        "vocabulary_size=10 is smaller than data.vocabulary_size=320",
    ),
    (f"ptdp fit {NANO} --model.config.dropout 2", "dropout=2.0 must be at least 0 and less than 1"),
    (
        f"ptdp fit {NANO} --model.optimizer.learning_rate=-1",
        "learning_rate=-1.0 must not be negative",
    ),
    (
        f"ptdp fit {NANO} --model.optimizer.warmup_steps=-1",
        "warmup_steps=-1 must be an integer of at least 0",
    ),
    (
        f"ptdp fit {NANO} --seed_everything abc",
        "seed_everything: Expected bool or int. Got value: abc",
    ),
    (f"ptdp fit {NANO} --ckpt_path nowhere", "--ckpt_path nowhere does not exist"),
    (f"ptdp fit {NANO} --ckpt_path other.ckpt", "--ckpt_path other.ckpt has no 'model.wte.weight'"),
    (f"ptdp fit {NANO} --config", "expected one argument"),
    (
        f"ptdp fit {NANO} --export theirs",
        "theirs is a folder with other content, which would be lost",
    ),
    (f"ptdp fit {NANO} --nonsense", "there is no key 'nonsense'"),
    (f"ptdp fit {NANO} nonsense", "unrecognized arguments: nonsense"),
    (
        f"ptdp validate {ONE} --ckpt_path nowhere",
        "--ckpt_path nowhere does not exist",
    ),
    (f"ptdp test {ONE} --ckpt_path text.ckpt", "--ckpt_path text.ckpt is not a checkpoint"),
    (
        f"ptdp predict {ONE} --ckpt_path theirs --output scores.jsonl",
        "theirs is a Hugging Face folder",
    ),
    (
        f"ptdp fit {NANO} {S}partition [1,1,1,x]",
        r"partition: Expected int or str or null. Got value: \[1, 1, 1, 'x'\]",
    ),
    (f"ptdp fit {NANO} {S}offload disk", "there is no key 'trainer.strategy.offload'"),
    (f"ptdp fit {NANO} --model.config.hidden_size 0", "hidden_size=0 must be a positive integer"),
    (
        f"ptdp fit {NANO} --model.config.num_heads 3",
        "hidden_size=32 is not divisible by num_heads=3",
    ),
    (f"ptdp fit {NANO} --data.nothing 3", "TextDataModule has no 'nothing'"),
    (
        f"ptdp fit {NANO} --trainer.overfit_batches=-1",
        r"invalid value -1(\.0)? for overfit_batches",
    ),
    (
        f"ptdp fit {NANO} --trainer.enable_checkpointing maybe",
        "enable_checkpointing: Expected bool or null. Got value: maybe",
    ),
    (f"ptdp fit {NANO} --sample 3", "sample=3 is not an existing class"),
    ("ptdp prepare", "there is no model. Use --config"),
    (f"ptdp test {NANO} --ckpt_path best", "--ckpt_path best is known only to the process that"),
    (
        f"ptdp fit {NANO} --ckpt_path last --trainer.logger false --trainer.default_root_dir new",
        "--ckpt_path last: there is no checkpoint in ",
    ),
    ("ptdp generate --checkpoint theirs -t 0", "tensor_parallel_size=0 must be a positive integer"),
    ("ptdp convert theirs theirs", "theirs would change theirs, which is the source"),
    ("ptdp convert theirs text.ckpt", "text.ckpt is a file, which would be replaced"),
    (
        "ptdp convert s3://key:hidden@bucket/x.ckpt out",
        r"s3://\*\*\*@bucket/x.ckpt contains credentials",
    ),
    ("ptdp convert empty.yaml out", "empty.yaml is not a checkpoint folder"),
    ("ptdp ckpt inspect theirs", "theirs is not a checkpoint"),
    (
        "ptdp ckpt reshard weights.ckpt text.ckpt --weights_only",
        "text.ckpt is a file, which would be replaced",
    ),
    (
        "ptdp plan --recipe gpt/nano --world 8 --device cpu --tp 3",
        "num_heads=4 is not divisible by it",
    ),
    (
        "ptdp plan --recipe gpt/nano --world 8 --device cpu --reserve 2",
        "reserve=2.0 must be a share of the memory",
    ),
    (
        "ptdp plan --recipe gpt/nano --world 8 --device cpu --software nothing",
        "software='nothing' is unknown",
    ),
    (
        "ptdp plan --recipe gpt/nano --world 8 --device cpu --picture plan.foo",
        "--picture plan.foo must end in",
    ),
    ("ptdp bench --config gpt/nano --compare ''", "--compare has no layout"),
    ("ptdp bench --config gpt/nano --compare 't2 q3'", "'q3' is not a degree"),
    ("ptdp recipes show ../../etc/passwd", "is neither a file nor a recipe"),
    (f"ptdp verify {NANO} --steps 0", "--steps 0 must be at least 1"),
    (
        "ptdp fit --launcher slurm --config gpt/nano --nodes 0 --dry-run",
        "num_nodes=0 is not a number of nodes",
    ),
    ("ptdp serve", "there is no verb 'serve'"),
]


@pytest.fixture(scope="module")
def desk(corpus, tmp_path_factory):
    """Change into a folder of valid and invalid files for the commands."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "text").symlink_to(corpus)
    (folder / "empty.yaml").touch()
    (folder / "broken.yaml").write_text("trainer: {max_steps: 3")
    (folder / "list.yaml").write_text("- trainer")
    (folder / "mapping.yaml").write_text("trainer: [max_steps, 3]")
    (folder / "twice.yaml").write_text("trainer:\n  max_steps: 3\n  max_steps: 5\n")
    (folder / "utf16.json").write_bytes("{}".encode("utf-16"))
    (folder / "circle.yaml").write_text("base: circle.yaml")
    (folder / "text.ckpt").write_text("hello")
    (folder / "my_module.py").write_text("class NoModule: pass\n")
    hf_gpt2().save_pretrained(folder / "theirs")
    torch.save({"state_dict": {"w": torch.zeros(2)}}, folder / "weights.ckpt")
    torch.save(
        {"state_dict": {"w": torch.zeros(2)}, "optimizer_states": [], "loops": {}},
        folder / "other.ckpt",
    )
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def last_line(line, capfd, monkeypatch):
    """Run the command and return its exit code, last line of output and all output."""
    words = shlex.split(line)
    while words[0] != "ptdp":
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    runs = sorted(Path("runs/gpt-nano").glob("*"), key=lambda run: run.stat().st_mtime)
    capfd.readouterr()
    code = main(
        [word.replace("RUN", runs[-1].name) if "/RUN/" in word else word for word in words[1:]]
    )
    read = "".join(reversed(capfd.readouterr()))  # stderr before stdout
    return code, next((one for one in reversed(read.splitlines()) if one.strip()), ""), read


def test_samples_without_chat_template_are_refused_before_launch(desk, capfd, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", refuse)
    prefix = "--trainer.callbacks.init_args."
    line = (
        f"ptdp fit {NANO} --data.data_dir others --trainer.callbacks+ WriteSamples "
        f"{prefix}prompts [a] {prefix}chat true"
    )
    code, _, read = last_line(line, capfd, monkeypatch)
    assert (code, "has no chat template" in read) == (2, True), read


@pytest.mark.timeout(600)
def test_valid_commands_succeed_in_sequence(desk, capfd, monkeypatch):
    assert len(WALK) >= 60
    assert len(BAD) >= 150
    assert {line.split()[1] for line, _ in WALK if line != "ptdp"} >= {*VERBS}
    for line, pattern in WALK:
        code, last, read = last_line(line, capfd, monkeypatch)
        assert code == 0, f"{line}\n{read}"
        assert re.search(pattern, last), f"{line}\n{last}"
    assert (
        LitGPT.load_from_checkpoint(
            next(Path("runs/gpt-nano").glob("*/checkpoints/last.ckpt"))
        ).config.hidden_size
        == 32
    )


@pytest.mark.parametrize(
    ("line", "said"),
    BAD,
    ids=[line.removeprefix("ptdp ").replace(TINY, "").replace(ALONE, "") for line, _ in BAD],
)
def test_invalid_command_is_refused(line, said, desk, capfd, caplog, monkeypatch):
    """The command prints one line, exits with code 2 and changes no file."""
    before = {
        path: path.stat().st_mtime_ns for path in desk.rglob("*") if "__pycache__" not in str(path)
    }
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, last, read = last_line(
            line.replace("TAKEN", str(taken.getsockname()[1])), capfd, monkeypatch
        )
    assert code == 2, read
    assert re.search(said, last), read
    # ckpt verify prints a verdict for every checkpoint
    assert len(read.splitlines()) == (2 if "ckpt verify" in line else 1), read
    assert not caplog.messages  # Lightning's messages
    assert {
        path: path.stat().st_mtime_ns for path in desk.rglob("*") if "__pycache__" not in str(path)
    } == before
