"""Everything private: an owner's data and model, their training, the gate, the audit log, the service.

``host`` serves messages, ``session`` is one run, ``requests`` takes a question in and hands its answer out
through the ``gate``; ``group`` computes nodes together. ``mechanism`` chooses rules and prices, ``budgets``
pay, ``audit`` writes down what left, in ``entries``, with a ``head``. ``owner`` and ``node_file`` are the
owner's folder. ``training`` is local training.

May import privacy, protocol and what lies below. A newcomer rarely changes anything here; read ``gate``
first.
"""
