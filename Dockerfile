# Images with gpu_vecenv from this checkout. Neither has been built by CI yet.
#   docker build --target cpu -t gpu-vecenv:cpu .        docker run --rm gpu-vecenv:cpu doctor
#   docker build --target cuda -t gpu-vecenv:cuda .      docker run --rm --gpus all gpu-vecenv:cuda doctor
# The image for GPUs needs no CUDA toolkit: NVRTC comes with the extra; the host brings the driver and NVIDIA's container toolkit.

FROM python:3.12-slim AS base
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml MANIFEST.in README.md LICENSE ./
COPY adapters adapters
COPY cuda cuda
COPY gpu_vecenv gpu_vecenv

FROM base AS cpu
RUN pip install torch --index-url https://download.pytorch.org/whl/cpu && pip install ".[train]"
RUN useradd --create-home player
USER player
WORKDIR /home/player
ENTRYPOINT ["gpu-vecenv"]

FROM base AS cuda
RUN pip install ".[cuda13,train]"
RUN useradd --create-home player
USER player
WORKDIR /home/player
ENTRYPOINT ["gpu-vecenv"]
