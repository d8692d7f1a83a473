"""What a trained model says: predictions, the graph of its states, and how far to believe them.

``pretrained`` opens a run, ``decoding`` reads masks. How uncertain a model is about
lost words stands in ``entropy`` (Appendices E and P). ``scene`` and ``explorer`` draw the graph as
a page to play with.
"""
