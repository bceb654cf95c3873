# A node of Sentinel Swarm. docs/deploy.md tells how to run it, deploy/build-test.sh builds it and tries it out.
#
#   docker build -t sentinel-swarm .
#
# BASE   a Debian (or a derivative) with Python 3.11 as python3. Add @sha256:... to hold it to the byte.
# TORCH  auto: the build that pip chooses; cpu or cuda: that one and no other.
# pip's own settings, such as an index of CPU builds, come as a secret and stay out of the image:
#   docker build --secret id=pip,src=pip.conf --build-arg TORCH=cpu -t sentinel-swarm .

ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS build
ARG TORCH=auto
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_PROGRESS_BAR=off PIP_ROOT_USER_ACTION=ignore
# A few dependencies come as source. Debian keeps Python's headers and venv apart, the python images do not.
RUN set -eu; \
    needed="gcc libc6-dev libgmp-dev"; \
    python3 -c 'import ensurepip' 2>/dev/null || needed="$needed python3-venv"; \
    python3 -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null \
        || needed="$needed python3-dev"; \
    apt-get update; \
    apt-get install -y --no-install-recommends $needed
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY deploy/image/fill_venv.py deploy/image/
RUN python3 -m venv /opt/sentinel
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/sentinel/bin/python deploy/image/fill_venv.py dependencies --torch "$TORCH"
COPY README.md LICENSE ./
COPY verifier verifier
COPY protocol protocol
COPY node node
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/sentinel/bin/python deploy/image/fill_venv.py project
COPY deploy/image/healthcheck.py /opt/sentinel/healthcheck.py
RUN /opt/sentinel/bin/python deploy/image/fill_venv.py trim

FROM ${BASE}
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Sentinel Swarm" \
      org.opencontainers.image.description="Train a language model on strangers' machines, and eject those that cheat." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# The number is fixed, so that volumes outlive the image and Kubernetes can see that it is not root. /run/sentinel is
# where a coordinator may leave its invite.
RUN echo 'sentinel:x:10001:10001:Sentinel Swarm:/data:/usr/sbin/nologin' >>/etc/passwd \
    && echo 'sentinel:x:10001:' >>/etc/group \
    && install -d -m 0700 -o 10001 -g 10001 /data \
    && install -d -m 0755 -o 10001 -g 10001 /run/sentinel
COPY --from=build /opt/sentinel /opt/sentinel
ENV PATH=/opt/sentinel/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/data \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    SENTINEL_STATE_DIR=/data \
    SENTINEL_PORT=31330 \
    SENTINEL_HTTP_PORT=9464
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 31330 9464
# Importing torch from a cold disk can take a minute, and the page comes after that.
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=3 \
    CMD ["/opt/sentinel/bin/python", "-I", "/opt/sentinel/healthcheck.py"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["sentinel"]
CMD ["join"]
