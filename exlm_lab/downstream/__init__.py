"""The tasks a trained encoder is fine-tuned on, and how their answers are scored (§5).

``task`` defines what a task is, and ``metrics`` scores its answers. GLUE, SQuAD 2.0 and MoleculeNet
are read from their published files or from the Hugging Face hub; ``inference`` and ``patterns``
need only the package; ``examples`` reads any table. ``prepared`` makes a task ready for a model,
``finetuning`` trains the model, ``grid`` and ``runs`` choose and run many settings and seeds.
"""
