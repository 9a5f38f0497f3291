"""Everything private: an owner's data and model, local training, the gate, the audit log and the node
service.

One response of a deployed node, in reading order:

1. ``node_service`` receives a message; ``refusals`` replies to one that fails.
2. ``session`` is the current run: data, model and state, with its files in ``run_folder``.
3. ``admission`` holds all rules that refuse, in order, under the owner's ``policy``; ``approvals`` the runs
   that the owner approved; ``limits`` stops what takes too much time or memory.
4. ``request_handler`` takes the query (its ``received_tensors``) from admission to release, and computes the
   response of a ``node``. ``exchanges`` keeps recent queries and responses for repeated messages, and
   ``input_gradients`` computes gradients from them. ``query_functions`` runs the method's function
   (``captured_functions`` as a CUDA graph), which sees the node as a ``node_view`` and its networks as
   ``network_view``. For nodes that compute together see ``node_group``, ``stacked_modules``,
   ``stacked_calls`` and ``architectures``.
5. ``gate`` checks, bounds and noises a release: ``run_mechanism`` is the noise. ``plain_releases`` lets the
   server see each; ``secure_aggregation`` turns them into masked parts of sums.
6. ``release_ledger`` holds the state of each release: admitted, trained, charged, released. It charges
   ``run_budgets``, and hands over what is charged.
7. ``audit_log`` writes each charge before that, as one of the ``audit_entries`` in an ``audit_database``.
   ``folder_log`` opens the log of a node's folder and writes security events into it.
8. ``replies`` holds the reply.

Others: ``owner_folder`` and ``node_file`` (configuration), ``folder_check`` (its faults), ``model_setup``,
``local_training``, ``initial_training``, ``dp_training``, ``protection`` with ``noise_calibration``,
``privacy_forecast`` (cost of a run beforehand), ``kit_identity``, ``overview`` (the whole node, for its
owner).

May import privacy, protocol and lower packages.
"""
