# syntax=docker/dockerfile:1
# CPU image with the demo: two attention ranks, one FFN rank, a tiny model trained during the build.
#
#   docker build -f docker/cpu.Dockerfile -t sglang-afd:0.1.0-cpu .      (from the top of the tree)
#   docker run --rm -p 30000:30000 --shm-size 1g --stop-timeout 45 sglang-afd:0.1.0-cpu

FROM python:3.12-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 afd
WORKDIR /opt/sglang-afd
COPY constraints.txt ./
RUN python -m pip install --no-cache-dir -c constraints.txt setuptools
# The requirements in a layer of their own: 9 GB that a change of our code does not touch.
ARG SGLANG_VERSION=0.5.17
RUN python -m pip install --no-cache-dir -c constraints.txt "sglang==${SGLANG_VERSION}"
COPY python ./python
RUN python -m pip install --no-cache-dir --no-build-isolation -c constraints.txt ./python
COPY --chown=1000 examples ./examples
USER 1000
RUN python examples/train_demo_model.py

EXPOSE 30000
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=5m --interval=15s --timeout=25s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:30000/health', timeout=20)"]
ENTRYPOINT ["tini", "--"]
# The last --host wins: the demo itself would listen inside the container only.
CMD ["python", "examples/demo.py", "--serve", "--port", "30000", "--", "--host", "0.0.0.0"]
