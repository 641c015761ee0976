"""The command push: models with their card, to the Hugging Face hub."""

from typing import Annotated

import typer

from caprmil.cli.shared import RunFolder, app


@app.command()
def push(
    run: RunFolder,
    repository: Annotated[str, typer.Argument(help="OWNER/NAME on the hub, or with @BRANCH.")],
    fold: Annotated[str, typer.Option(help="Push the model of one fold; default: all.")] = "",
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public; default: private.")
    ] = False,
    licence: Annotated[
        str, typer.Option("--licence", "--license", help="Of the models, e.g. apache-2.0.")
    ] = "",
    show_card: Annotated[
        bool, typer.Option("--card", help="Print the card, and push nothing.")
    ] = False,
) -> None:
    """Push models and their card to the Hugging Face hub.

    Slides and patients are not named. Log in once with: hf auth login

    \b
    Examples:
      caprmil push runs/first lab/tumour --card
      caprmil push runs/first lab/tumour --licence cc-by-nc-4.0
    """
    from caprmil.runs.hub_run import push_run, run_card
    from caprmil.runs.run import Run

    trained = Run(run)
    chosen, licence_text = fold or None, licence or None
    if show_card:
        name = repository.partition("@")[0]
        typer.echo(run_card(trained, name, fold=chosen, licence=licence_text), nl=False)
        return
    url = push_run(trained, repository, fold=chosen, private=not public, licence=licence_text)
    typer.echo(f"Pushed to {url}")
    load = "MILModel.from_pretrained" if chosen else "Run.from_pretrained"
    typer.echo(f'Load it with caprmil.{load}("{repository}").')
