#!/bin/bash
echo $((6 * 7)) > answer.txt
echo "6 * 7" > /logs/artifacts/notes.txt
