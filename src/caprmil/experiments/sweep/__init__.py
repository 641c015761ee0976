"""Sweeps: a recipe trained at many points, as a grid or by a search. A sweep is a folder:

sweep.toml     the plan
points/NAME/   a run per point; pruned.json in a point that was pruned
seconds.json   the training time of each point
commands.txt   the commands that wrote the folder, if it was the command line
trials.json    the proposals of a Bayesian search
sweep.csv      every metric of every point and fold
sweep.md       a table of the points
sweep.png      a figure, written when the sweep is finished

A sweep that is repeated with its axes in another order is the same sweep. Its tables and figure in
that order are beside the others, e.g. sweep-heads-tokens.png.

This file loads nothing, so that `caprmil status` is quick.
"""

PLAN, POINTS, PRUNED = "sweep.toml", "points", "pruned.json"
SECONDS, PROPOSALS = "seconds.json", "trials.json"
STEM = "sweep"  # of the tables and the figure
FIGURE = f"{STEM}.png"
