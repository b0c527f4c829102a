"""Attribution beyond our own rules, in a process of its own: a service elsewhere, a service of the job, a language
model, and the export of results. Whatever happens to it costs the training nothing."""
