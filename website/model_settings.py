"""What the settings of models and pools mean, for the reference of settings."""

MEANINGS = {
    "branches": 'Attention branches: "single", "multi" (one per class), or "auto": by the number '
    "of classes.",
    "both_streams": "Whether the probabilities are the mean of those of both streams.",
    "depth": "Context blocks (T in the paper).",
    "dim": "Width of the projected patches.",
    "dims": "Widths of the layers that project the patches.",
    "distil": 'What a pseudo-bag passes on: "afs", its pooled vector; "maxs", its patches of the '
    'highest activation; "maxmins", the highest and the lowest.',
    "distilled": 'Patches that all pseudo-bags of a bag pass on together, with "maxs" and '
    '"maxmins".',
    "diversity_weight": "Weight of the loss that keeps the global vectors apart.",
    "draws": "Random draws in evaluation; 0: the means are used.",
    "dropout": "Share of activations that is left out in training.",
    "gated": "Whether the attention has a gate.",
    "gp_dim": "Width of the input of the Gaussian process.",
    "groups": "Pseudo-bags that a bag is divided into.",
    "heads": "Heads of the attention.",
    "hidden": "Width of the layer that gives the attention scores.",
    "inducing": "Inducing points of the Gaussian process.",
    "init": '"centred": the first block starts by subtracting the mean of the slide; "usual": with '
    "random weights.",
    "instance_weight": "Share of the instance loss in the loss; the rest is the loss of the bag.",
    "k": "Patches from each end of the attention in the instance loss; default: 32 for one branch, "
    "16 for several.",
    "landmarks": "Landmarks of the Nystrom attention.",
    "learn_temperature": "Whether the temperatures of the assignments are trained.",
    "mask_padding": "Whether the Nystrom attention leaves out the padding to a multiple of the "
    "landmarks; the authors' code does not.",
    "mlp_ratio": "Width of the MLP, as a multiple of `dim`.",
    "noise": 'Of the draws: "independent" for each patch, or "shared" by all patches of a draw.',
    "normalise": "Whether the weighted sum of the patches is divided by the weights.",
    "patch_dropout": "Share of the patches that is left out in training.",
    "pool": "What turns patches into one vector: a pool, or another model.",
    "prior": 'Prior of the attention: "none", "detection" (label 0 is without tumour) or '
    '"subtyping".',
    "seed": "Of the random draws in evaluation.",
    "spatial": "Whether the means of the attention are smoothed over the grid of the patches.",
    "subtyping": "Whether classes exclude each other: patches of high attention for another class "
    "are then negative examples.",
    "temperature": "Where the temperatures of the assignments start; a lower one assigns more "
    "sharply.",
    "tokens": "Tokens per head (M in the paper).",
    "triplet_weight": "Weight of the loss that draws the global vectors to positive bags, and away "
    "from negative ones.",
    "value_map": "Whether a layer maps the patches before they are summed.",
    "vectors": "Global vectors.",
    "warmup_epochs": "First epochs, in which the losses of the global vectors are left out.",
    "DTFDMIL.seed": "Of the division into pseudo-bags in evaluation.",
    "DSMIL.hidden": "Width of the queries that compare patches with the critical ones.",
    "DSMIL.dropout": "Of the layer of `value_map`, in training.",
    "AttentionPool.hidden": "Width of the layer that gives the attention scores; default: that of "
    "the patches.",
    "SGPMIL.draws": "Random draws, in training and evaluation; 0: one in training, the means in "
    "evaluation.",
    "GatedAttentionPool.hidden": "Width of the layer that gives the attention scores; default: "
    "that of the patches.",
}
"""By the name of a setting, where it means the same in all models, or by CLASS.NAME."""


def meaning(kind: str, setting: str) -> str:
    """Return what a setting of a class means, or nothing if it is not known."""
    return MEANINGS.get(f"{kind}.{setting}", MEANINGS.get(setting, ""))
