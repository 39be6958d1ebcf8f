# docker build --tag candid . && docker run --publish 127.0.0.1:8000:8000 --env CANDID_TOKEN=secret candid
# `python -m experiments.container` runs these steps without a container engine.
FROM python:3.11-slim
WORKDIR /source
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY candid candid
RUN pip install --no-cache-dir --constraint constraints.txt '.[web]'
RUN useradd --create-home candid
USER candid
WORKDIR /home/candid
ENV CANDID_CACHE=/tmp/candid
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=30s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz')"]
ENTRYPOINT ["candid", "serve"]
CMD ["everyday", "--host", "0.0.0.0", "--port", "8000"]
