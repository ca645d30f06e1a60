# docker build -t stoker .                                                   the CPU build of torch
# docker build -t stoker --build-arg TORCH=cuda .                            the CUDA build
# docker build -t stoker --build-arg EXTRAS='[service,sql]' .                with extras
# docker run --rm --shm-size 1g -v "$PWD:/work" --user "$(id -u)" stoker train stoker.yaml
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS build
ARG TORCH=cpu
ARG EXTRAS=""
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python -m venv /opt/stoker
RUN if [ "$TORCH" = cpu ]; then \
      ./run torch /opt/stoker/bin/python "$(sed -n 's/^torch==//p' constraints/cpu.txt)" && \
      /opt/stoker/bin/pip install --no-cache-dir -c constraints/cpu.txt ".$EXTRAS"; \
    else /opt/stoker/bin/pip install --no-cache-dir ".$EXTRAS"; fi

FROM python:${PYTHON}-slim
ARG TORCH=cpu
# Triton compiles a launcher for each of its kernels when it first runs.
RUN if [ "$TORCH" = cuda ]; then \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; fi
RUN useradd --create-home --uid 1000 stoker && mkdir /work && chown stoker /work
COPY --from=build /opt/stoker /opt/stoker
ENV PATH=/opt/stoker/bin:$PATH MPLCONFIGDIR=/tmp/matplotlib
USER stoker
WORKDIR /work
ENTRYPOINT ["stoker"]
CMD ["--help"]
