# SGLang's server with kvtuner in it; docs/serving.md#containers has the commands.
ARG SGLANG_VERSION=0.5.23
FROM lmsysorg/sglang:v${SGLANG_VERSION}

WORKDIR /opt/kvtuner
COPY . .
# The image's torch and SGLang stay as they are: a dependency that would move a package ends the build, and so does an
# SGLang that this kvtuner was not tested with.
RUN export PIP_BREAK_SYSTEM_PACKAGES=1 \
    && python3 -m pip freeze --exclude-editable | grep -F '==' > /tmp/image.txt \
    && python3 -m pip install --no-cache-dir --constraint /tmp/image.txt '.[sglang]' \
    && rm -rf build *.egg-info /tmp/image.txt
# Away from the checkout, so that the installed package is what is imported.
WORKDIR /workspace
RUN python3 -c "from kvtuner.runtime_loader.sglang.compat.releases import release_rules; release_rules()"

EXPOSE 30000
ENTRYPOINT ["python3", "-m", "sglang.launch_server", "--host", "0.0.0.0", "--port", "30000"]
