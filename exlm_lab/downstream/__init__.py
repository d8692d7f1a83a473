"""The tasks a trained encoder is fine-tuned on, and how their answers are scored (§5).

``task`` says what a task is, ``metrics`` scores the answers. GLUE, SQuAD 2.0, MoleculeNet come from
the files their makers publish or from the hub; ``inference`` and ``patterns`` need only the
package; ``examples`` reads any table. ``prepared`` makes a task ready for a model, ``finetuning``
trains it, ``grid`` runs many settings and seeds.
"""
