# Settings of vllm-project/router, README.md, "Standard Data Parallelism Routing", commit
# 03e9af5c1982f7568d79021d80d812edecb2d702, Apache-2.0.
vllm-router \
  --worker-urls http://worker1:8000 http://worker2:8000 \
    --policy consistent_hash \
    --intra-node-data-parallel-size 8
