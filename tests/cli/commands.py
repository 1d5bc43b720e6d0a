"""Command-line options shared by several tests."""

PTDP = [
    "--trainer.devices=4",
    "--trainer.strategy=lightning_ptdp.PTDPStrategy",
    "--trainer.strategy.tensor_parallel_size=2",
    "--trainer.strategy.pipeline_parallel_size=2",
    "--trainer.strategy.virtual_pipeline_size=2",
    "--trainer.strategy.num_microbatches=4",
    "--trainer.strategy.start_method=fork",
]

SAVE_EACH_STEP = {
    "class_path": "ModelCheckpoint",
    "init_args": {
        "every_n_train_steps": 1,
        "save_top_k": 2,
        "monitor": "step",
        "mode": "max",
        "save_last": True,
    },
}
