#!/bin/bash
tr ' ' '\n' <<< "$NUMBERS" | sort -n > /app/sorted.txt
