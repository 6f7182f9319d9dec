# The gateway alone: no agent, no engine, none of the extras.
FROM python:3.12-slim AS build
WORKDIR /src
# The target environment has no pip of its own, so none ships.
RUN python -m venv --without-pip /opt/prefix-gateway
COPY pyproject.toml README.md LICENSE ./
COPY kvstore kvstore
COPY gateway gateway
RUN pip --python /opt/prefix-gateway/bin/python install --no-cache-dir .

FROM python:3.12-slim
COPY --from=build /opt/prefix-gateway /opt/prefix-gateway
ENV PATH=/opt/prefix-gateway/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 65532:65532
# 8000 is the public endpoint, 8001 the admin page and /metrics. The configuration decides on which address they listen.
EXPOSE 8000 8001
ENTRYPOINT ["prefix-gateway"]
CMD ["serve", "--config", "/etc/prefix-gateway/config.yaml"]
