# What the emulated processor finds in place of a BIOS: protected mode, and the start of a kernel that lies in memory.
    .code16
start:
    cli
    lgdtl %cs:(table - start)
    movl %cr0, %eax
    orb $1, %al
    movl %eax, %cr0
    ljmpl $0x10, $(flat - start + 0xffff0000)
    .code32
flat:
    movw $0x18, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    xorl %ebx, %ebx
    xorl %ebp, %ebp
    xorl %edi, %edi
    movl $0x10000, %esi  # emulated_machine.py's PARAMETERS
    movl $0x100000, %eax  # emulated_machine.py's KERNEL
    jmp *%eax
    .balign 8
segments:  # those of Linux's boot protocol: 0x10 is code, 0x18 is data, both of all memory
    .quad 0, 0, 0x00cf9b000000ffff, 0x00cf93000000ffff
table:
    .word 31
    .long segments - start + 0xffff0000
    .org 0xfff0  # where the processor starts
    .code16
    jmp start
    .org 0x10000
