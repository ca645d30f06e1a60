"""Reference training on latents: a small operator, the training loop, its checkpoints and its curves.

config.py      settings of a run, what it asks of a loader, and what it comes to
step.py        one optimizer step: learning rate, guard against NaN, signals as a flag
state.py       checkpoints (safetensors and JSON), optimizer and random state, numerics, lines of metrics
loop.py        the one loop: passes, steps, evaluations, stall, resume; what is learned is an `Objective`
operator.py    z1 = z0 + f(z0, cond), a small transformer; its decoder; batches as it takes them
objective.py   the operator as an objective, and the losses of its stages
evaluate.py    validation error next to persistence, and roll-out; of one task, or of each
run.py         `train`: begins or resumes a run of the operator and does its stages
report.py      curves, and the page around them
batch_size.py  the largest batch that runs; `torch.compile` off, for debugging

`stoker.pipeline.fitting.fit` trains on complete records with the same loop.
"""
