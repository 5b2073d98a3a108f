"""The main job in small: a policy trained by reinforcement learning on a vLLM server that is never restarted."""
