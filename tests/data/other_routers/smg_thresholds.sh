# Settings of lightseekorg/smg, docs/getting-started/load-balancing.md, "Cache-Aware", branch main, read
# 2026-11-24, Apache-2.0.
smg \
  --policy cache_aware \
  --worker-urls http://w1:8000 http://w2:8000 \
  --cache-threshold 0.3 \
  --balance-abs-threshold 64 \
  --balance-rel-threshold 1.5
