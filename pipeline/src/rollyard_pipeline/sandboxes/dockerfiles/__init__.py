"""Dockerfiles as definition files of Apptainer, made through spython where the translation is faithful."""
