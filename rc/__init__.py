"""RolloutCore: live weight updates for vLLM engines, version-pure and on the record."""
