# Settings of vllm-project/router, README.md, "Retries and Circuit Breakers", commit
# 03e9af5c1982f7568d79021d80d812edecb2d702, Apache-2.0. Two examples in one command.
vllm-router \
  --worker-urls http://localhost:8080 http://localhost:8081 \
  --retry-max-retries 3 --retry-initial-backoff-ms 100 --retry-max-backoff-ms 10000 \
  --retry-backoff-multiplier 2.0 --retry-jitter-factor 0.1 \
  --cb-failure-threshold 5 --cb-success-threshold 2 \
  --cb-timeout-duration-secs 30 --cb-window-duration-secs 60
