# Trains and exports the demo's model, once, into /bundles/demo; a minute or two on two cores.
ARG PYTHON_VERSION=3.11
FROM python:${PYTHON_VERSION}-slim-bookworm
WORKDIR /app
COPY pyproject.toml .
# PyPI's torch is gigabytes of CUDA, which this does not need.
RUN python -c "import tomllib; \
extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
wanted = [*extras['training'], *extras['export'], *extras['cpu']]; \
print(*(one for one in wanted if not one.startswith(('seq2seq-serve', 'torch'))), sep='\n')" > /tmp/requirements.txt \
 && pip install --no-cache-dir --no-deps --extra-index-url https://download.pytorch.org/whl/cpu --retries 1 \
    torch==2.13.0 \
 && pip install --no-cache-dir torch==2.13.0 -r /tmp/requirements.txt
# As in a clone, seq2seq_serve finds its parts beside its folder.
COPY seq2seq_serve seq2seq_serve
COPY bundle bundle
COPY kernels kernels
COPY training training
COPY export export
ENV PYTHONUNBUFFERED=1 ORT_DISABLE_TELEMETRY=1 HOME=/tmp
CMD ["sh", "-c", "test -f /bundles/demo/manifest.json \
 || { python -m training train demo --out /tmp/run && python -m export /tmp/run /bundles/demo --precision fp32,int8; }"]
