"""The words that server and nodes share: questions, kinds of tensor, methods, plans and messages.

``method`` is the base of every method, and the list of those that have names. ``questions`` declares what
nodes can be asked. ``kinds`` says of each tensor that travels what it is of, which policies, mechanisms,
checks and reports read. ``plan`` is what a server declares before it asks. ``messages`` are bytes;
``schedule`` is how long and at which rate nodes train.

May import data, models, tasks, core. A newcomer adds a kind that several methods release.
"""
