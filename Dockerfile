# docker build -t recmill .                           # for CPUs
# docker build -t recmill-cuda --build-arg SETUP=cuda .   # for NVIDIA GPUs, never tried
FROM python:3.11-slim-bookworm
ARG SETUP=cpu
# The CPU kernels are compiled at first use.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/recmill
COPY requirements requirements
RUN pip install --no-cache-dir -r requirements/${SETUP}.txt
RUN pip install --no-cache-dir --no-deps -r requirements/torchrec.txt
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY src src
RUN pip install --no-cache-dir --no-deps --no-build-isolation .
WORKDIR /work
ENTRYPOINT ["recmill"]
