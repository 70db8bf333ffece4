# The server in a container: ONNX Runtime, gRPC, no torch, no compiler.
#
#   docker build -t seq2seq-serve:cpu .
#   docker build -t seq2seq-serve:gpu --build-arg RUNTIME=gpu .
#   docker run --init --read-only --stop-timeout 40 -p 50051:50051 -p 9464:9464 \
#       -v "$PWD/bundles:/bundles:ro" seq2seq-serve:cpu
#
# What follows the image's name goes to `python -m server`: bundles and flags. Without any it is
# `/bundles/demo --insecure`.
ARG PYTHON_VERSION=3.11

# The operators in C++, compiled as pyproject.toml says.
FROM python:${PYTHON_VERSION}-slim-bookworm AS kernels
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY pyproject.toml .
COPY kernels kernels
RUN PYTHONPATH=kernels python -c "import pathlib, sources, tomllib; \
digest = sources.digest_of_sources(pathlib.Path('kernels')); \
modules = tomllib.load(open('pyproject.toml', 'rb'))['tool']['setuptools']['ext-modules']; \
[print('g++ -shared -fPIC -o', each['name'].replace('seq2seq_serve.', '').replace('.', '/') + '.so', \
    f'-DSOURCES_DIGEST=\'\"{digest}\"\'', \
    *each['extra-compile-args'], *each['sources'], '-ldl') for each in modules]" | sh -e \
 && test -s kernels/_operators.so && test -s kernels/_cuda_operators.so

FROM python:${PYTHON_VERSION}-slim-bookworm AS build
# cpu or gpu: the extra of pyproject.toml with ONNX Runtime.
ARG RUNTIME=cpu
WORKDIR /app
# Dependencies before code: changing code does not install them again. They are those of the `server` extra, pinned
# (`make lock`). The `client` extra is left out: it adds only what draws heatmaps, and the health check draws none.
COPY deploy/requirements-${RUNTIME}.txt /tmp/requirements.txt
RUN python -m venv --without-pip /opt/venv \
 && pip --python /opt/venv/bin/python install --no-cache-dir --only-binary :all: --no-deps --require-hashes \
    -r /tmp/requirements.txt
# As in a clone, seq2seq_serve finds its parts beside its folder.
COPY seq2seq_serve seq2seq_serve
COPY bundle bundle
COPY protos protos
COPY server server
COPY client client
COPY bulk bulk
COPY documents documents
COPY --from=kernels /app/kernels kernels
# Byte code now, as a container can write none; unchecked, as nobody edits it there.
RUN python -m compileall -q --invalidation-mode unchecked-hash seq2seq_serve bundle kernels protos documents server client bulk

FROM python:${PYTHON_VERSION}-slim-bookworm
LABEL org.opencontainers.image.title="seq2seq-serve" \
      org.opencontainers.image.description="gRPC server for encoder-decoder models on ONNX Runtime" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app
# SEQ2SEQ_HOST comes before `host` in a TOML file, as every variable does.
# Since 1.29 ONNX Runtime tells Microsoft about every session, unless it is forbidden to.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    ORT_DISABLE_TELEMETRY=1 \
    SEQ2SEQ_HOST=0.0.0.0
WORKDIR /app
# A number, so that Kubernetes can see that it is not root.
USER 10001:10001
EXPOSE 50051 9464
# Draining may take as long as --drain-seconds: give `docker stop` more than its 10 seconds.
STOPSIGNAL SIGTERM
# By HTTP, which has neither TLS nor tokens.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-m", "client", "health", "--metrics-url", "http://127.0.0.1:9464", "--timeout-seconds", "4"]
ENTRYPOINT ["python", "-m", "server"]
# A container's port is reached through its network. Where others can read along there, name --tls-certificate and
# --tls-key instead of --insecure.
CMD ["/bundles/demo", "--insecure"]
