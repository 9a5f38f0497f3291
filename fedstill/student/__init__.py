"""Use the student of a finished run: load it, predict, evaluate it on new data, export it.

``student_model`` is a student with its preprocessing, as a torch module. ``predict`` writes its predictions
for new data, ``evaluate`` measures it on new data with the code that evaluates runs. ``export`` writes it in
formats of other tools and checks that they compute the same; ``hugging_face`` is the format of that library.

Student imports ``runs`` and packages below it. To add a format, write its functions in ``export`` and a line
in ``FORMATS``.
"""
