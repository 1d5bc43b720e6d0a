# Image for machines with NVIDIA GPUs (their driver comes from the host):
#
#   docker build --tag lightning-ptdp .
#   docker run --gpus all --ipc=host --volume "$PWD:/work" lightning-ptdp fit --config gpt/124m
#
# --ipc=host: NCCL and snapshot_every_n_steps need a large /dev/shm.
FROM python:3.12-slim

# torch.compile builds kernels with gcc.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/lightning-ptdp
COPY pyproject.toml README.md LICENSE ./
COPY lightning_ptdp ./lightning_ptdp
COPY recipes ./recipes
RUN pip install --no-cache-dir ".[hf,fp8,qlora]"

WORKDIR /work
ENTRYPOINT ["ptdp"]
