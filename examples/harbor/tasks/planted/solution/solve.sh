#!/bin/bash
echo done > result.txt
