"""Progressive layer drop (Zhang and He 2020, arXiv 2010.13369): layers of a pre-LN transformer are dropped by a
schedule while it trains, the same ones on every rank. A dropped layer costs nothing, forward or backward.

```python
schedule = ProgressiveLayerDrop(theta=0.5, gamma="auto", total_steps=100_000)
drop_layers(model, schedule, seed=1)
for step, batch in enumerate(loader):
    schedule.update_state(step)
    ...
```

What a dropped layer's parameters do in that step: they get no gradient, as if they were not in the model. So torch's
optimizers and thinwire's sharded ones leave them alone: no moment decays, no weight decays. `OneBitAdam` leaves them
alone in its warmup; once frozen they count as zero gradients on every rank, and error feedback goes on. DDP, which
knows no absence, gives them zero gradients, without searching the graph. With gradient accumulation a parameter has
what the micro-steps that kept its layer gave it.
"""

from __future__ import annotations

from thinwire.pld.dropping import LayerDrop, drop_layers, undrop
from thinwire.pld.schedule import ProgressiveLayerDrop, keep_probability

__all__ = ["LayerDrop", "ProgressiveLayerDrop", "drop_layers", "keep_probability", "undrop"]
