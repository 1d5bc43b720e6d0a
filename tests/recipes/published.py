"""Published model sizes and batch sizes of the recipes."""

from dataclasses import dataclass

__all__ = ["PUBLISHED", "Published"]


@dataclass(frozen=True)
class Published:
    """Row of a published table.

    Attributes:
        parameters: Number as printed, such as ``"1.7 B"``; exact to its last digit.
        batch: Sequences per step, over all replicas.
        tensor: Tensor-parallel size, if published.
        pipeline: Pipeline-parallel size, if published.
        devices: Number of GPUs, if published.
    """

    parameters: str
    batch: int
    tensor: int | None = None
    pipeline: int | None = None
    devices: int | None = None


PUBLISHED = {
    # GPT-2: the published weights (the paper's own counts, 117M to 1542M, leave parameters out);
    # its section 2.3 has the batch.
    "gpt/124m": Published("124 M", 512),
    "gpt/355m": Published("355 M", 512),
    "gpt/774m": Published("774 M", 512),
    "gpt/1.5b": Published("1558 M", 512),
    # arXiv 1909.08053, table 1; the batch is in section 4.2.
    "gpt/megatron-1.2b": Published("1.2 B", 512, 1, 1, 64),
    "gpt/megatron-2.5b": Published("2.5 B", 512, 2, 1, 128),
    "gpt/megatron-4.2b": Published("4.2 B", 512, 4, 1, 256),
    "gpt/megatron-8.3b": Published("8.3 B", 512, 8, 1, 512),
    # arXiv 2104.04473, table 1.
    "gpt/ptdp-1.7b": Published("1.7 B", 512, 1, 1, 32),
    "gpt/ptdp-3.6b": Published("3.6 B", 512, 2, 1, 64),
    "gpt/ptdp-7.5b": Published("7.5 B", 512, 4, 1, 128),
    "gpt/ptdp-18.4b": Published("18.4 B", 1024, 8, 1, 256),
    "gpt/ptdp-39.1b": Published("39.1 B", 1536, 8, 2, 512),
    "gpt/ptdp-76.1b": Published("76.1 B", 1792, 8, 4, 1024),
    "gpt/ptdp-145.6b": Published("145.6 B", 2304, 8, 8, 1536),
    "gpt/ptdp-310.1b": Published("310.1 B", 2160, 8, 16, 1920),
    "gpt/ptdp-529.6b": Published("529.6 B", 2520, 8, 35, 2520),
    "gpt/ptdp-1t": Published("1008.0 B", 3072, 8, 64, 3072),
    # The published weights of Llama 3.2 1B; batches of 4 M tokens (arXiv 2407.21783,
    # section 3.4.1).
    "gpt/llama-1b": Published("1.24 B", 512),
    # arXiv 1810.04805, section 3 and appendix A.2.
    "bert/base": Published("110 M", 256),
    "bert/large": Published("34e1 M", 256),
    # arXiv 1909.08053, sections 4.2 and 5.3.
    "bert/megatron-336m": Published("336 M", 1024),
    "bert/megatron-1.3b": Published("1.3 B", 1024),
    "bert/megatron-3.9b": Published("3.9 B", 1024),
}
