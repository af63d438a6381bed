# docker build -t h2o-stream . && docker run -it -v h2o-stream:/data h2o-stream
#
# Chats without torch. `docker run -p 8000:8000 ... h2o-stream h2o-serve --host 0.0.0.0` serves. Conversations and what
# is downloaded are in /data.
FROM python:3.12-slim AS compiled
RUN apt-get update && apt-get install -y --no-install-recommends g++
WORKDIR /h2o
COPY . .
RUN H2O_SETS=all python set_up.py chat && rm -r build

FROM python:3.12-slim
COPY --from=compiled /h2o /h2o
ENV PATH=/h2o/.venv/bin:$PATH XDG_DATA_HOME=/data XDG_CACHE_HOME=/data/cache HF_HOME=/data/huggingface
VOLUME /data
CMD ["h2o-chat"]
