"""Everything private: an owner's data and model, local training, the gate, the audit log and the node
service.

One response of a deployed node, in reading order:

1. ``node_service`` receives a message; ``refusals`` replies to one that fails.
2. ``session`` is the current run: data, model and state, with its files in ``run_folder``.
3. ``admission`` holds all rules that refuse, in order, under the owner's ``policy``; ``approvals`` the runs
   that the owner approved; ``limits`` stops what takes too much time or memory.
4. ``request_handler`` receives the query, computes the response of a ``node`` and its input gradients, and
   keeps both for repeated messages. ``query_functions`` runs the method's function (``captured_functions`` as
   a CUDA graph), which sees the node as a ``node_view`` and its networks as ``network_view``. For nodes that
   compute together see ``node_group``, ``stacked_modules``, ``stacked_calls`` and ``architectures``.
5. ``gate`` bounds, noises, charges and releases it: ``run_mechanism`` is the noise, ``run_budgets`` the
   budgets; ``secure_aggregation`` turns a release into a masked part of a sum.
6. ``audit_log`` writes it before it is handed over, as one of the ``audit_entries`` in an
   ``audit_database``. ``folder_log`` opens the log of a node's folder and writes security events into it.
7. ``replies`` holds the reply.

Others: ``owner_folder`` and ``node_file`` (configuration), ``folder_check`` (its faults), ``model_setup``,
``local_training``, ``initial_training``, ``dp_training``, ``protection`` with ``noise_calibration``,
``privacy_forecast`` (cost of a run beforehand), ``kit_identity``, ``overview`` (the whole node, for its
owner).

May import privacy, protocol and lower packages.
"""
