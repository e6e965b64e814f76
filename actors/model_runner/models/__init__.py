"""Model code: what turns a ForwardBatch into logits. `registry` maps an architecture's name to it."""
